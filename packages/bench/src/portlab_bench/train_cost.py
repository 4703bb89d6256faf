"""What a fine-tuning run takes and costs on a machine, by one formula for TPUs and GPUs.

The step of a run was compiled for one slice: matrix products, bytes to and from HBM, bytes over ICI. On that slice its
time is the roofline over the efficiency that published training runs reached (`nox -s bench_backtest`). On any other
machine the same products and bytes, spread over all chips, are held against that machine's published peaks and divided
by the same efficiency; transfers between chips are left out, and what a device needs of its memory is not known. The
first is compiled and modelled, the second modelled alone, and both say so.

A run's cost adds what a machine is paid for before the first step: starting, loading and compiling (`Overheads`).
"""

from collections.abc import Sequence
from dataclasses import dataclass

from portlab_bench.compiled import JOBS, Compiled, CompiledRun, load_compiled
from portlab_bench.evidence import Figure
from portlab_bench.machines import Machine, parse_machine
from portlab_bench.published import find_published
from portlab_bench.serve_model import weight_bytes
from portlab_spec.models.published import published_config

GIB = 2**30


@dataclass(frozen=True)
class TrainRow:
    """A run on a machine.

    Attributes:
        job: key of `JOBS`.
        model: Hugging Face id.
        machine: the hardware.
        basis: slice whose compiled step the figures come from.
        hbm: GiB a device needs, also of a step that the compiler refused; None if it was not compiled for this machine.
        usable: GiB that it has.
        step: seconds.
        tokens_per_second: of all chips, as the data give them.
        hours: of the steps alone.
        overhead: seconds before the first step.
    """

    job: str
    model: str
    machine: Machine
    basis: str
    hbm: Figure | None
    usable: Figure
    step: Figure
    tokens_per_second: Figure
    hours: Figure
    overhead: Figure

    @property
    def fits(self) -> bool:
        """False if the compiler refused the step, or the weights alone need more memory than all chips have.

        True is no promise where the step was not compiled.
        """
        if self.hbm:
            return self.hbm.value <= self.usable.value
        config = published_config(self.model)
        return config is None or weight_bytes(config) < self.machine.hbm_bytes

    @property
    def paid_hours(self) -> float:
        """Hours that a run is paid for."""
        return self.hours.value + self.overhead.value / 3600


def train_rows(machines: Sequence[Machine], jobs: Sequence[str] = tuple(JOBS)) -> list[TrainRow]:
    """Rows of the training table, by job and machine, in the order given."""
    return [train_row(job, machine) for job in jobs for machine in machines]


def train_row(job: str, machine: Machine, compiled: Compiled | None = None) -> TrainRow:
    """A run of a job on a machine: from its own compiled step, else from that of the slice most like it.

    Raises:
        KeyError: no such job.
    """
    data = compiled or load_compiled()
    runs = [run for run in data.runs if run.job == job]
    if not runs:
        raise KeyError(job)
    own = next((run for run in runs if run.slice == machine.name), None)
    refused = next((run for run in data.refused if (run.job, run.slice) == (job, machine.name)), None)
    run = own or min(runs, key=lambda other: abs(parse_machine(other.slice).devices - machine.devices))
    seconds = run.step_seconds if own else _elsewhere(run, machine, data.efficiency)
    note = "" if own else f"products and bytes of the step compiled for {run.slice}, at this machine's peaks"
    day = data.when[:10]

    def figure(value: float, unit: str, more: str = "") -> Figure:
        words = "; ".join(filter(None, (note, more)))
        return Figure(value=value, unit=unit, evidence="modelled", record=run.key, date=day, note=words)

    usable = Figure(
        value=machine.hbm_bytes / machine.devices / GIB,
        unit="GiB",
        evidence="published",
        record="portlab_spec.hardware",
        date=day,
    )
    hbm = None
    if of_step := own or refused:
        hbm = Figure(value=of_step.hbm_needed / GIB, unit="GiB", evidence="compiled", record=of_step.key, date=day)
    return TrainRow(
        job=job,
        model=JOBS[job][0],
        machine=machine,
        basis=run.slice,
        hbm=hbm,
        usable=usable,
        step=figure(seconds, "s", f"efficiency {data.efficiency:.2f}, fitted on published runs"),
        tokens_per_second=figure(run.tokens / seconds, "tokens/s"),
        hours=figure(run.steps * seconds / 3600, "h"),
        overhead=train_overhead(machine, runs),
    )


def _elsewhere(run: CompiledRun, machine: Machine, efficiency: float) -> float:
    devices = parse_machine(run.slice).devices
    compute = run.flops * devices / machine.bf16_flops
    hbm = run.hbm_traffic * devices / machine.hbm_bandwidth
    return max(compute, hbm) / efficiency


def train_overhead(machine: Machine, runs: Sequence[CompiledRun]) -> Figure:
    """Seconds that are paid for before the first step: starting and loading, and on TPUs compiling.

    On TPUs: a TPU machine's measured time until a server is healthy, its compiling included, stands for booting and
    loading, and the step's own compile time is added. That is the shortest of the job's compilations, for whichever
    slice: programs of a job are of one size, and what else ran on the machine that compiled only lengthens it. On GPUs
    no start was found published with a date: the same time is assumed, without compiling.
    """
    start = find_published("xbill9-v6e-1-start")
    compiling = min(run.compile_seconds for run in runs) if machine.part else 0.0
    note = "start of a TPU server, published, and the step's shortest compile time on two CPU cores"
    if not machine.part:
        note = "assumed: as long as the start of a TPU server, nothing is compiled"
    return Figure(
        value=start.value + compiling, unit="s", evidence="modelled", record=start.record, date=start.as_of, note=note
    )
