"""`nox -s train_jax` installs the build of JAX for the accelerator that it finds, and says why."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SPEC = importlib.util.spec_from_file_location("accelerator", ROOT / "accelerator.py")
accelerator = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(accelerator)

H100 = "580.65.06, 9.0\n580.65.06, 9.0\n"
V100 = "580.65.06, 7.0\n"
OLD_DRIVER = "550.54.14, 9.0\n"
ANCIENT_DRIVER = "470.82.01, 7.5\n"
MIXED = "580.65.06, 9.0\n580.65.06, 7.0\n"
PROC_CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.14  Thu Feb 22 01:44:30 UTC 2024\nGCC version:\n"
PROC_OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  580.65.06  Release Build\nGCC version:\n"
NETWORK_CARD, TPU_V6E, TPU_V5P = "0x0042", "0x006f", "0x0062"


def choose(root, env=(), smi="", system="linux"):
    return accelerator.choose(dict(env), root, lambda: smi, system)


def write(path, text=""):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def pci(root, slot, device, vendor="0x1ae0"):
    write(root / "sys/bus/pci/devices" / slot / "vendor", vendor + "\n")
    write(root / "sys/bus/pci/devices" / slot / "device", device + "\n")


def test_a_machine_without_accelerators_gets_the_cpu_build(tmp_path):
    assert choose(tmp_path).build == "cpu"


@pytest.mark.parametrize(
    ("smi", "build"),
    [
        pytest.param(H100, "cuda13", id="H100"),
        pytest.param(V100, "cuda12", id="CUDA 13 dropped Volta"),
        pytest.param(MIXED, "cuda12", id="the oldest of several GPUs counts"),
        pytest.param(OLD_DRIVER, "cuda12", id="driver before 580"),
        pytest.param(ANCIENT_DRIVER, "cpu", id="driver before 525"),
    ],
)
def test_the_driver_and_the_oldest_gpu_choose_the_cuda_build(tmp_path, smi, build):
    assert choose(tmp_path, smi=smi).build == build


@pytest.mark.parametrize("text", [PROC_CLOSED, PROC_OPEN, "unreadable"])
def test_without_nvidia_smi_the_driver_in_proc_is_enough_for_cuda_12(tmp_path, text):
    write(tmp_path / "proc/driver/nvidia/version", text)
    assert choose(tmp_path).build == "cuda12"


def test_an_old_driver_in_proc_is_too_old(tmp_path):
    write(tmp_path / "proc/driver/nvidia/version", PROC_CLOSED.replace("550.54.14", "470.82.01"))
    choice = choose(tmp_path)
    assert choice.build == "cpu"
    assert "driver 470 is older than 525" in choice.reason


def test_a_gpus_device_file_is_enough_for_cuda_12(tmp_path):
    write(tmp_path / "dev/nvidia0")
    assert choose(tmp_path).build == "cuda12"


@pytest.mark.parametrize("device", [TPU_V6E, TPU_V5P])
def test_a_tpu_is_found_on_the_pci_bus(tmp_path, device):
    pci(tmp_path, "0000:00:04.0", NETWORK_CARD)
    pci(tmp_path, "0000:00:05.0", device)
    assert choose(tmp_path) == ("tpu", "TPU at PCI 0000:00:05.0")


def test_googles_network_card_is_no_tpu(tmp_path):
    pci(tmp_path, "0000:00:04.0", NETWORK_CARD)
    assert choose(tmp_path).build == "cpu"


def test_another_vendors_device_of_the_same_number_is_no_tpu(tmp_path):
    pci(tmp_path, "0000:00:05.0", TPU_V6E, vendor="0x8086")
    assert choose(tmp_path).build == "cpu"


def test_a_tpus_device_file_is_a_sign(tmp_path):
    write(tmp_path / "dev/accel0")
    assert choose(tmp_path) == ("tpu", "/dev/accel0")


@pytest.mark.parametrize("name", accelerator.TPU_VARIABLES)
def test_the_variables_of_a_tpu_pod_are_a_sign(tmp_path, name):
    assert choose(tmp_path, {name: "localhost"}).build == "tpu"


def test_a_tpu_comes_before_a_gpu(tmp_path):
    write(tmp_path / "dev/accel0")
    assert choose(tmp_path, smi=H100).build == "tpu"


@pytest.mark.parametrize("system", ["darwin", "win32"])
def test_other_systems_get_the_cpu_build(tmp_path, system):
    assert choose(tmp_path, smi=H100, system=system).build == "cpu"


@pytest.mark.parametrize(
    ("asked", "smi", "build"),
    [
        ("cpu", H100, "cpu"),
        ("tpu", "", "tpu"),
        ("cuda", H100, "cuda13"),
        ("cuda", OLD_DRIVER, "cuda12"),
        ("cuda", "", "cuda12"),
        ("cuda13", OLD_DRIVER, "cuda13"),
    ],
)
def test_the_override_wins(tmp_path, asked, smi, build):
    write(tmp_path / "dev/accel0")
    assert choose(tmp_path, {"PORTLAB_ACCELERATOR": asked}, smi).build == build


def test_an_unknown_override_is_refused_with_the_choices(tmp_path):
    with pytest.raises(ValueError, match="PORTLAB_ACCELERATOR=gpu: choose one of cpu, cuda, cuda12, cuda13, tpu"):
        choose(tmp_path, {"PORTLAB_ACCELERATOR": "gpu"})


def test_the_line_says_what_why_and_how_to_override(tmp_path):
    assert str(choose(tmp_path, smi=H100)) == (
        "JAX for cuda13: NVIDIA driver 580, compute capability 9.0, found by nvidia-smi "
        "(PORTLAB_ACCELERATOR=cpu|cuda|cuda12|cuda13|tpu overrides)"
    )


@pytest.mark.parametrize(("build", "platforms"), [("cpu", "cpu"), ("cuda12", "cuda,cpu"), ("tpu", "tpu,cpu")])
def test_jax_is_told_its_platform(build, platforms):
    assert accelerator.Choice(build, "").variables({"HOME": "/home/u"}) == {"JAX_PLATFORMS": platforms}


def test_what_the_user_has_set_for_jax_stays():
    assert accelerator.Choice("cuda13", "").variables({"JAX_PLATFORMS": "cpu"}) == {}


def pins_of(environment):
    """Versions, whichever platforms need them."""
    return {line.partition(" ;")[0] for line in (ROOT / "requirements" / f"{environment}.txt").read_text().splitlines()}


@pytest.mark.parametrize("session", ["train_jax", "train_torchax"])
@pytest.mark.parametrize("build", ["cpu", "cuda12", "cuda13", "tpu"])
def test_every_build_has_pins_of_the_same_versions(build, session):
    """What is tested on a CPU is what runs on the accelerator."""
    common, pins = pins_of(session), pins_of(accelerator.Choice(build, "").environment(session))
    assert common <= pins
    plugin = {"cpu": "jax", "tpu": "libtpu"}.get(build, f"jax-{build}-plugin")
    assert any(line.startswith(f"{plugin}==") for line in pins)
