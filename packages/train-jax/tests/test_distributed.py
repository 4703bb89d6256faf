"""Several hosts: how a process finds the others, and what they agree on."""

import os
import re
import socket
import subprocess
import sys
import textwrap

import pytest

from portlab_jax import distributed
from portlab_jax.distributed import Peers, find_peers, has_tpu
from portlab_spec.errors import UserError

TOLD = {"PORTLAB_COORDINATOR": "trainer-0:1234", "PORTLAB_PROCESSES": "4", "PORTLAB_PROCESS": "1"}
SLURM = {
    "SLURM_JOB_ID": "7",
    "SLURM_STEP_NODELIST": "node[1-4]",
    "SLURM_NTASKS": "4",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
}


@pytest.mark.parametrize(
    ("env", "tpu", "peers"),
    [
        pytest.param({}, False, None, id="a laptop"),
        pytest.param(TOLD, False, Peers("PORTLAB_COORDINATOR", "trainer-0:1234", 4, 1), id="told"),
        pytest.param({**TOLD, **SLURM}, True, Peers("PORTLAB_COORDINATOR", "trainer-0:1234", 4, 1), id="told first"),
        pytest.param({**TOLD, "PORTLAB_PROCESSES": "1", "PORTLAB_PROCESS": "0"}, False, None, id="told: alone"),
        pytest.param(dict.fromkeys(TOLD, ""), False, None, id="empty variables say nothing"),
        pytest.param(SLURM, False, Peers("Slurm"), id="a Slurm step of 4 tasks"),
        pytest.param({**SLURM, "SLURM_NTASKS": "1"}, False, None, id="a Slurm step of 1 task"),
        pytest.param({"SLURM_JOB_ID": "7", "SLURM_NTASKS": "4"}, False, None, id="a Slurm job outside srun"),
        pytest.param({"OMPI_COMM_WORLD_SIZE": "2"}, False, Peers("Open MPI"), id="Open MPI"),
        pytest.param({"OMPI_COMM_WORLD_SIZE": "1"}, False, None, id="Open MPI of one"),
        pytest.param({"TPU_WORKER_HOSTNAMES": "a,b,c,d"}, True, Peers("TPU slice"), id="GKE, 4 hosts"),
        pytest.param({"TPU_WORKER_HOSTNAMES": "localhost"}, True, None, id="GKE, 1 host"),
        pytest.param({"TPU_WORKER_HOSTNAMES": "a,b"}, False, None, id="a TPU pod told to use its CPU"),
        pytest.param({"TPU_PROCESS_ADDRESSES": "a:1,b:1"}, True, Peers("TPU slice"), id="TPU process addresses"),
        pytest.param({"TPU_PROCESS_ADDRESSES_PATH": "/addresses"}, True, Peers("TPU pod"), id="addresses in a file"),
        pytest.param(
            {"MEGASCALE_NUM_SLICES": "2", "TPU_WORKER_HOSTNAMES": "a"}, True, Peers("TPU pod"), id="GKE, 2 slices"
        ),
        pytest.param({}, True, Peers("Cloud TPU metadata", certain=False), id="a TPU VM"),
        pytest.param({"TPU_SKIP_MDS_QUERY": "1"}, True, None, id="a TPU VM without metadata"),
    ],
)
def test_how_the_peers_are_found(env, tpu, peers):
    assert find_peers(env, tpu=tpu) == peers


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"PORTLAB_PROCESS": ""}, "PORTLAB_PROCESS: not set, though PORTLAB_COORDINATOR is"),
        (
            {"PORTLAB_COORDINATOR": "", "PORTLAB_PROCESS": ""},
            "PORTLAB_COORDINATOR, PORTLAB_PROCESS: not set, though PORTLAB_PROCESSES is",
        ),
        ({"PORTLAB_COORDINATOR": "trainer-0"}, "PORTLAB_COORDINATOR: 'trainer-0' is not HOST:PORT"),
        ({"PORTLAB_COORDINATOR": "trainer-0:x"}, "PORTLAB_COORDINATOR: 'trainer-0:x' is not HOST:PORT"),
        ({"PORTLAB_PROCESSES": "0"}, "PORTLAB_PROCESSES: '0' is not a number from 1"),
        ({"PORTLAB_PROCESSES": "four"}, "PORTLAB_PROCESSES: 'four' is not a number from 1"),
        ({"PORTLAB_PROCESS": "4"}, "PORTLAB_PROCESS: '4' is not a number from 0 to 3"),
        ({"PORTLAB_PROCESS": "-1"}, "PORTLAB_PROCESS: '-1' is not a number from 0 to 3"),
    ],
)
def test_half_told_is_refused_with_what_is_missing(changes, message):
    with pytest.raises(UserError, match=re.escape(message)):
        find_peers({**TOLD, **changes}, tpu=False)


@pytest.mark.parametrize(
    ("device", "libtpu", "platforms", "found"),
    [
        ("dev/accel0", True, "", True),
        ("dev/vfio/0", True, "", True),
        ("dev/vfio/0", True, "tpu,cpu", True),
        ("dev/vfio/0", True, "cpu", False),
        ("dev/vfio/0", False, "", False),
        ("dev/vfio/vfio", True, "", False),
    ],
)
def test_a_tpu_is_a_device_and_its_library(tmp_path, monkeypatch, device, libtpu, platforms, found):
    (tmp_path / device).parent.mkdir(parents=True)
    (tmp_path / device).touch()
    monkeypatch.setattr(distributed.importlib.util, "find_spec", lambda name: object() if libtpu else None)
    assert has_tpu({"JAX_PLATFORMS": platforms}, tmp_path) == found


def test_alone_nothing_is_joined(monkeypatch):
    monkeypatch.setattr(distributed.jax.distributed, "initialize", lambda *_, **__: pytest.fail("joined"))
    distributed.initialize({})
    assert distributed.is_main()


def test_a_tpu_vm_whose_metadata_name_nobody_trains_alone(monkeypatch):
    def unknown_cluster():
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(distributed, "has_tpu", lambda env: True)
    monkeypatch.setattr(distributed.jax.distributed, "initialize", unknown_cluster)
    distributed.initialize({})


def test_a_slice_that_jax_cannot_join_does_not_train_alone(monkeypatch):
    def unknown_cluster():
        raise ValueError("coordinator_address should be defined.")

    monkeypatch.setattr(distributed, "has_tpu", lambda env: True)
    monkeypatch.setattr(distributed.jax.distributed, "initialize", unknown_cluster)
    with pytest.raises(ValueError, match="coordinator_address"):
        distributed.initialize({"TPU_WORKER_HOSTNAMES": "a,b"})


def test_a_coordinator_that_nobody_runs_is_named(monkeypatch):
    monkeypatch.setattr(distributed, "WAIT_SECONDS", 0)
    address = f"127.0.0.1:{free_port()}"
    with pytest.raises(UserError, match=f"PORTLAB_COORDINATOR: {address}: .*Start process 0 there"):
        distributed.initialize({**TOLD, "PORTLAB_COORDINATOR": address})


def test_one_process_has_nobody_to_agree_with():
    assert distributed.stop_agreement() is None


def test_one_process_agrees_with_itself():
    distributed.check_same("recipe", "anything")


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


PROCESS = """
    import os, signal, time
    from portlab_jax import distributed
    from portlab_spec.errors import UserError

    distributed.initialize()
    print("main", distributed.is_main())
    distributed.check_same("recipe", "same")
    try:
        distributed.check_same("rows", os.environ["PORTLAB_PROCESS"])
    except UserError as error:
        print(error)
    agreed = distributed.stop_agreement()
    for step in range(200):
        if step == 3 and not distributed.is_main():
            os.kill(os.getpid(), signal.SIGTERM)
        if agreed(step):
            print("stopped after step", step)
            break
        time.sleep(0.05)
"""


def test_two_processes_find_each_other_compare_inputs_and_stop_at_the_same_step():
    """SIGTERM reaches one of them; both leave the loop after the same step."""
    told = {"PORTLAB_COORDINATOR": f"127.0.0.1:{free_port()}", "PORTLAB_PROCESSES": "2", "JAX_PLATFORMS": "cpu"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", textwrap.dedent(PROCESS)],
            env={**os.environ, **told, "PORTLAB_PROCESS": str(i)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    first, second = ([line for line in output.splitlines() if not line.startswith("[Gloo]")] for output in outputs)
    assert (first[0], second[0]) == ("main True", "main False")
    assert first[1] == second[1] == "rows: process 1 and process 0 differ. Give every host the same files"
    assert first[2] == second[2]
    assert re.fullmatch(r"stopped after step \d+", first[2])
