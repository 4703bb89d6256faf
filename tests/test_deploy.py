"""The launch files of docs/deploy fit the slices that they name, agree with each other and run commands that exist."""

import math
import re
import shlex
from pathlib import Path
from typing import NamedTuple

import jsonschema
import pytest
import yaml

from portlab_jax import cli

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "docs" / "deploy"
DOCUMENTS = [DEPLOY / "README.md", ROOT / "docs" / "multi-host.md"]


class Slice(NamedTuple):
    chips: int
    hosts: int
    topology: str
    machine: str


# https://docs.cloud.google.com/tpu/docs/v5p and /v6e; the numbers in v5p's names count its two TensorCores per chip.
SLICES = {
    "v5p-8": Slice(4, 1, "2x2x1", "ct5p-hightpu-4t"),
    "v5p-16": Slice(8, 2, "2x2x2", "ct5p-hightpu-4t"),
    "v6e-8": Slice(8, 1, "2x4", "ct6e-standard-8t"),
    "v6e-16": Slice(16, 4, "4x4", "ct6e-standard-4t"),
}
GENERATIONS = {"v5p": "tpu-v5p-slice", "v6e": "tpu-v6e-slice"}
RUNTIMES = {"v5p": "v2-alpha-tpuv5", "v6e": "v2-alpha-tpuv6e"}  # SkyPilot 0.14.1's defaults


def exactly(required, optional=()):
    """JSON schema of an object with these fields and no others."""
    properties = {**required, **dict(optional)}
    return {
        "type": "object",
        "properties": properties,
        "required": list(required),
        "additionalProperties": False,
    }


def array(items):
    return {"type": "array", "items": items, "minItems": 1}


STRING, COUNT = {"type": "string"}, {"type": "integer", "minimum": 0}
STRINGS = {"type": "object", "additionalProperties": STRING}
TPU = exactly({"google.com/tpu": COUNT})
SECRET = exactly({"name": STRING, "key": STRING}, {"optional": {"type": "boolean"}})
VARIABLE = {
    "oneOf": [
        exactly({"name": STRING, "value": STRING}),
        exactly({"name": STRING, "valueFrom": exactly({"secretKeyRef": SECRET})}),
    ]
}
CONTAINER = exactly(
    {
        "name": STRING,
        "image": STRING,
        "command": array(STRING),
        "args": array(STRING),
        "env": array(VARIABLE),
        "ports": array(exactly({"containerPort": COUNT})),
        "resources": exactly({"requests": TPU, "limits": TPU}),
        "volumeMounts": array(exactly({"name": STRING, "mountPath": STRING})),
    }
)
VOLUME = {
    "oneOf": [
        exactly({"name": STRING, "csi": exactly({"driver": STRING, "volumeAttributes": STRINGS})}),
        exactly({"name": STRING, "emptyDir": exactly({})}),
    ]
}
POD = exactly(
    {
        "serviceAccountName": STRING,
        "restartPolicy": {"const": "Never"},  # what podFailurePolicy asks for
        "terminationGracePeriodSeconds": COUNT,
        "nodeSelector": STRINGS,
        "containers": array(CONTAINER),
        "volumes": array(VOLUME),
    }
)
EXIT_CODES = exactly({"containerName": STRING, "operator": {"enum": ["In", "NotIn"]}, "values": array(COUNT)})
JOB = exactly(
    {
        "completionMode": {"const": "Indexed"},
        "parallelism": COUNT,
        "completions": COUNT,
        "backoffLimit": COUNT,
        "podFailurePolicy": exactly(
            {"rules": array(exactly({"action": {"enum": ["FailJob"]}, "onExitCodes": EXIT_CODES}))}
        ),
        "template": exactly({"metadata": exactly({"annotations": STRINGS}), "spec": POD}),
    }
)
RULE = exactly(
    {"name": STRING, "action": {"enum": ["FailJobSet", "RestartJobSet"]}, "onJobFailureReasons": array(STRING)}
)
JOBSET = exactly(
    {
        "apiVersion": {"const": "jobset.x-k8s.io/v1alpha2"},
        "kind": {"const": "JobSet"},
        "metadata": exactly({"name": STRING, "annotations": STRINGS}),
        "spec": exactly(
            {
                "failurePolicy": exactly(
                    {
                        "maxRestarts": COUNT,
                        "restartStrategy": {"enum": ["Recreate", "BlockingRecreate"]},
                        "rules": array(RULE),
                    }
                ),
                "replicatedJobs": array(
                    exactly({"name": STRING, "replicas": COUNT, "template": exactly({"spec": JOB})})
                ),
            }
        ),
    }
)
SKY = exactly(
    {
        "name": STRING,
        "workdir": {"const": "."},
        "num_nodes": {"const": 1},
        "resources": exactly(
            {
                "infra": {"const": "gcp"},
                "accelerators": STRING,
                "accelerator_args": exactly({"runtime_version": STRING}),
                "use_spot": {"type": "boolean"},
            }
        ),
        "envs": STRINGS,
        "secrets": exactly({"HF_TOKEN": {"const": ""}}),
        "file_mounts": {
            "type": "object",
            "additionalProperties": exactly({"name": STRING, "store": {"const": "gcs"}, "mode": {"const": "MOUNT"}}),
        },
        "setup": STRING,
        "run": STRING,
    }
)


def load(kind, name):
    return yaml.safe_load((DEPLOY / kind / f"{name}.yaml").read_text())


def job_of(jobset):
    (replicated,) = jobset["spec"]["replicatedJobs"]
    assert replicated["replicas"] == 1, "one slice"
    return replicated["template"]["spec"]


def container_of(jobset):
    (container,) = job_of(jobset)["template"]["spec"]["containers"]
    return container


@pytest.mark.parametrize("kind", ["gke", "sky"])
def test_there_is_a_file_for_every_slice(kind):
    assert {path.stem for path in (DEPLOY / kind).glob("*")} == set(SLICES)


@pytest.mark.parametrize("name", SLICES)
@pytest.mark.parametrize(("kind", "schema"), [("gke", JOBSET), ("sky", SKY)])
def test_every_field_is_one_that_its_reader_knows(kind, schema, name):
    jsonschema.validate(load(kind, name), schema)


@pytest.mark.parametrize("name", SLICES)
def test_a_jobset_asks_for_the_slice_in_its_name(name):
    wanted, job = SLICES[name], job_of(load("gke", name))
    container, selector = container_of(load("gke", name)), job["template"]["spec"]["nodeSelector"]
    chips_per_host = container["resources"]["limits"]["google.com/tpu"]
    assert job["parallelism"] == job["completions"] == wanted.hosts
    assert container["resources"]["requests"] == container["resources"]["limits"]
    assert selector["cloud.google.com/gke-tpu-accelerator"] == GENERATIONS[name.split("-")[0]]
    assert selector["cloud.google.com/gke-tpu-topology"] == wanted.topology
    assert math.prod(map(int, wanted.topology.split("x"))) == wanted.chips == chips_per_host * wanted.hosts
    assert wanted.machine.endswith(f"-{chips_per_host}t")


@pytest.mark.parametrize("name", SLICES)
def test_a_sky_file_asks_for_the_slice_in_its_name(name):
    resources = load("sky", name)["resources"]
    assert resources["accelerators"] == f"tpu-{name}"
    assert resources["accelerator_args"]["runtime_version"] == RUNTIMES[name.split("-")[0]]


@pytest.mark.parametrize("name", SLICES)
def test_a_jobset_restarts_all_hosts_together_but_not_for_bad_input(name):
    jobset = load("gke", name)
    job, policy = job_of(jobset), jobset["spec"]["failurePolicy"]
    assert (policy["restartStrategy"], job["backoffLimit"]) == ("BlockingRecreate", 0)
    (rule,) = job["podFailurePolicy"]["rules"]
    assert rule["onExitCodes"] == {"containerName": container_of(jobset)["name"], "operator": "In", "values": [2]}
    (jobset_rule,) = policy["rules"]
    assert (jobset_rule["action"], jobset_rule["onJobFailureReasons"]) == ("FailJobSet", ["PodFailurePolicy"])


def test_exit_code_2_is_the_one_for_bad_input():
    from portlab_spec.errors import EXIT_BAD_INPUT

    assert EXIT_BAD_INPUT == 2


@pytest.mark.parametrize("name", SLICES)
def test_what_a_container_mounts_exists_and_what_it_uses_is_mounted(name):
    jobset = load("gke", name)
    container, pod = container_of(jobset), job_of(jobset)["template"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
    assert set(mounts) == {volume["name"] for volume in pod["spec"]["volumes"]}
    paths = [variable["value"] for variable in container["env"] if variable.get("value", "").startswith("/")]
    paths.append(str(cli.parse(container["args"]).out))
    assert all(path.startswith(tuple(f"{mount}/" for mount in mounts.values())) for path in paths)
    assert pod["metadata"]["annotations"]["gke-gcsfuse/volumes"] == "true"


@pytest.mark.parametrize("kind", ["gke", "sky"])
def test_files_of_one_kind_differ_only_in_the_slice_and_the_recipe(kind):
    """What is mended in one is mended in all."""
    fields = r"tpu-topology|tpu-accelerator|google\.com/tpu|parallelism|completions|args|accelerators|runtime_version"
    texts = set()
    for name in SLICES:
        lines = (DEPLOY / kind / f"{name}.yaml").read_text().splitlines()[1:]
        lines = [line for line in lines if not re.search(rf"^ *({fields}|cloud\.google\.com/gke-({fields})):", line)]
        lines = [line for line in lines if "train-jax --recipe" not in line]
        texts.add("\n".join(lines).replace(name, "SLICE"))
    assert len(texts) == 1


def commands(text):
    """Every call of the trainer in a text, as its arguments."""
    for line in text.replace("\\\n", " ").splitlines():
        if found := re.search(r"(?:^|[ /])train-jax( --[^|&;]*)$", line) or re.search(r"-s train_jax --( .*)$", line):
            yield shlex.split(found[1])


@pytest.mark.parametrize("name", SLICES)
def test_the_trainer_accepts_the_commands_of_the_launch_files(name):
    (sky,) = commands(load("sky", name)["run"])
    gke = container_of(load("gke", name))
    assert gke["command"] == ["train-jax"]
    assert cli.parse(gke["args"]) == cli.parse(sky)


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_the_trainer_accepts_the_commands_of_the_documents(document):
    found = [args for block in blocks(document) for args in commands(block)]
    assert found
    for args in found:
        assert cli.parse(args).out is not None


def blocks(document):
    return re.findall(r"```bash\n(.*?)```", document.read_text(), re.DOTALL)


def test_the_readmes_table_is_that_of_the_files():
    rows = re.findall(r"^\| (v\w+-\d+) \| (\d+) \| (\d+) \| ([\dx]+) \| ([\w-]+) \|", text(DOCUMENTS[0]), re.MULTILINE)
    assert {row[0]: Slice(int(row[1]), int(row[2]), *row[3:]) for row in rows} == SLICES


def test_the_readmes_node_pool_is_that_of_a_slice():
    pool = re.search(r"node-pools create (\S+) .*?```", text(DOCUMENTS[0]), re.DOTALL)
    options = dict(re.findall(r"--([\w-]+)=(\S+)", pool[0]))
    wanted = SLICES[pool[1]]
    assert options["machine-type"] == wanted.machine
    assert options["tpu-topology"] == wanted.topology
    assert int(options["num-nodes"]) == wanted.hosts


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_links_and_files_named_in_the_documents_exist(document):
    targets = re.findall(r"\]\(([^)#]+?)(?:#[^)]*)?\)", text(document))
    assert all((document.parent / target).exists() for target in targets if "://" not in target)
    assert all((ROOT / path).exists() for path in re.findall(r"docs/deploy/[\w/.-]*\w", text(document)))


def test_the_variables_of_multi_host_are_those_that_are_read():
    from portlab_jax.distributed import VARIABLES

    named = set(re.findall(r"PORTLAB_[A-Z]+", text(DOCUMENTS[1])))
    assert named == set(VARIABLES)


def test_the_image_puts_the_trainer_on_the_path():
    lines = text(DEPLOY / "Dockerfile")
    assert "nox -s train_jax --install-only" in lines
    assert "ENV PATH=/portlab/.nox/train_jax/bin:$PATH" in lines
    assert 'ENTRYPOINT ["train-jax"]' in lines


def text(path):
    return path.read_text()
