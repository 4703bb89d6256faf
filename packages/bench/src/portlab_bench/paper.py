"""arXiv:2605.25645, the comparison of Gemma 4 31B on TPU and GPU, taken apart: which of its figures follow from what.

Its training ratio in dollars is its ratio in hours times a ratio of list prices; its first tokens follow from how busy
prefill keeps the machine, and from how many requests there were. Everything here is arithmetic on shipped records.
"""

from dataclasses import dataclass

from portlab_bench.evidence import Evidence
from portlab_bench.machines import parse_machine
from portlab_bench.published import find_published
from portlab_bench.roofline import train_limit
from portlab_bench.serve_model import ServeModel
from portlab_bench.serve_rows import config_of

REQUESTS = 30  # of every run of its sweep
MODEL = "google/gemma-4-31B-it"


@dataclass(frozen=True)
class Finding:
    """A claim, taken apart.

    Attributes:
        key: short name.
        claim: what is published, in words.
        published: the value; None for a question that the paper does not ask.
        value: ours.
        unit: of both.
        follows: where our value comes from, in words.
        evidence: of our value.
        records: ids of the records that it is made of.
    """

    key: str
    claim: str
    published: float | None
    value: float
    unit: str
    follows: str
    evidence: Evidence
    records: tuple[str, ...]


def cost_ratio(speedup: float, usd: float, other_usd: float) -> float:
    """How much cheaper a run is on a machine of `usd` an hour that is `speedup` times as fast as one of `other_usd`."""
    return speedup * other_usd / usd


def even_price(speedup: float, usd: float, chips: int) -> float:
    """Price of one of the other machine's chips at which both cost the same."""
    return usd / speedup / chips


def prefill_share(machine: str, prompt: int, rate: float) -> float:
    """Share of the machine's published peak that prefill takes alone at a rate of requests."""
    serving = ServeModel(config_of(MODEL), parse_machine(machine))
    return rate * serving.prefill_flops(prompt) / serving.machine.bf16_flops


def request_bound(requests: int, tpot: float) -> float:
    """Tokens per second at most of so many requests that each take `tpot` seconds a token, whatever the machine."""
    return requests / tpot


def findings() -> list[Finding]:
    """All of them, in the order of the paper."""
    return [*_training(), *_first_tokens(), *_throughput(), *_totals()]


def _value(identity: str) -> float:
    return find_published(identity).value


def _training() -> list[Finding]:
    tpu, gpu = "paper-v5p-8-price", "paper-2xh100-price"
    hours = ("paper-train-v5p-8-hours", "paper-train-2xh100-hours")
    speedup = _value(hours[1]) / _value(hours[0])
    config = config_of(MODEL)
    shares = {
        name: _value(f"paper-train-{name.lower()}-train-throughput") / train_limit(config, parse_machine(name))
        for name in ("v5p-8", "2xH100")
    }
    peaks = parse_machine("v5p-8").bf16_flops / parse_machine("2xH100").bf16_flops
    return [
        Finding(
            "speedup",
            "training on v5p-8 is 1.61x faster",
            1.61,
            speedup,
            "ratio",
            "5.39 h over 3.34 h",
            "published",
            hours,
        ),
        Finding(
            "peaks",
            "(what peak FLOP/s alone would give)",
            None,
            peaks,
            "ratio",
            "4 v5p chips over 2 H100: the peaks favour the GPUs, the speedup is one of software",
            "modelled",
            hours,
        ),
        Finding(
            "share-v5p-8",
            "(share of the peak that training reached, v5p-8)",
            None,
            shares["v5p-8"],
            "share",
            "763 tokens/s over the bound of a LoRA step; padding is not counted",
            "modelled",
            ("paper-train-v5p-8-train-throughput",),
        ),
        Finding(
            "share-2xh100",
            "(the same, 2xH100)",
            None,
            shares["2xH100"],
            "share",
            "486 tokens/s; the paper names eager PyTorch as a cause",
            "modelled",
            ("paper-train-2xh100-train-throughput",),
        ),
        Finding(
            "cost",
            "training is 2.12x cheaper",
            2.12,
            cost_ratio(_value("paper-v1-train-speedup"), _value(tpu), _value(gpu)),
            "ratio",
            "1.61 x (2 x 11.06) / (4 x 4.20): list prices of one provider",
            "published",
            ("paper-v1-train-speedup", tpu, gpu),
        ),
        Finding(
            "even",
            "(H100 price at which both runs cost the same)",
            None,
            even_price(_value("paper-v1-train-speedup"), _value(tpu), 2),
            "USD/h",
            "16.80 / 1.61 / 2; below it the GPUs are cheaper",
            "published",
            ("paper-v1-train-speedup", tpu),
        ),
    ]


def _first_tokens() -> list[Finding]:
    burst = tuple(f"paper-v1-burst-{name}-ttft-median" for name in ("v6e-8", "2xh100"))
    found = [
        Finding(
            "burst",
            "median first token 235 ms against 475 ms (v1)",
            475 / 235,
            _value(burst[1]) / _value(burst[0]),
            "ratio",
            "64 prompts of 128 tokens at once: half a burst's prefill, no request alone",
            "published",
            burst,
        ),
    ]
    for name, says in (("v6e-8", "61 ms"), ("2xH100", "1,443 ms")):
        share = prefill_share(name, 4096, 4)
        found.append(
            Finding(
                f"busy-{name.lower()}",
                f"median first token {says} at 4 requests/s of 4,096 tokens ({name})",
                None,
                share,
                "share",
                "of the peak, by prefill alone; at usual efficiency (0.49) "
                + ("there is room" if share < 0.45 else "there is none: the queue grows"),
                "modelled",
                (f"paper-long-{name.lower()}-ttft",),
            )
        )
    for name in ("v6e-8", "2xh100"):
        for key, words in (("short", "512 tokens, 30 at once"), ("max", "15,360 tokens")):
            record = find_published(f"paper-{key}-{name}-ttft")
            config, machine = config_of(MODEL), parse_machine(record.machine)
            serving = ServeModel(config, machine)
            prompts = (record.burst or 2) / 2
            least = prompts * serving.prefill_flops(record.prompt_tokens or 1) / machine.bf16_flops
            found.append(
                Finding(
                    f"refused-{key}-{name}",
                    f"median first token {record.value * 1e3:,.0f} ms, {words} ({name})",
                    record.value,
                    least,
                    "s",
                    "refused: at the published peak the products alone take longer; "
                    "tokens were not computed, as when a prefix cache holds them",
                    "modelled",
                    (record.id,),
                )
            )
    return found


def _throughput() -> list[Finding]:
    found = []
    for name in ("v6e-8", "2xh100"):
        throughput, tpot = f"paper-long-{name}-throughput", f"paper-long-{name}-tpot"
        found.append(
            Finding(
                f"requests-{name}",
                f"peak of {_value(throughput):,.0f} tokens/s at 4,096 tokens in ({name})",
                _value(throughput),
                request_bound(REQUESTS, _value(tpot)),
                "tokens/s",
                "30 requests over its own time per token: the number of requests bounds it, not the machine",
                "published",
                (throughput, tpot),
            )
        )
    record = find_published("zimbres-tp8-block128-b256-output")
    found.append(
        Finding(
            "batch",
            "1,403 tokens/s at short context (v6e-8)",
            1403,
            record.value,
            "tokens/s",
            "others, same slice, 256 sequences at a time: cost per token is a matter of the batch",
            "published",
            ("paper-short-v6e-8-throughput", record.id),
        )
    )
    return found


def _totals() -> list[Finding]:
    runs = (_value("paper-train-v5p-8-run-cost"), _value("paper-train-2xh100-run-cost"))
    hourly = (_value("paper-v6e-8-price"), _value("paper-2xh100-price"))
    records = (
        "paper-train-v5p-8-run-cost",
        "paper-train-2xh100-run-cost",
        "paper-v6e-8-price",
        "paper-2xh100-price",
    )

    def total(hours: float) -> float:
        return (runs[1] + hours * hourly[1]) / (runs[0] + hours * hourly[0])

    return [
        Finding(
            "total-hour",
            "training and serving together 1.82x cheaper",
            1.82,
            total(1),
            "ratio",
            "one run and one hour of serving",
            "published",
            records,
        ),
        Finding(
            "total-day",
            "(the same for the day that the text speaks of)",
            None,
            total(24),
            "ratio",
            "one run and 24 hours: what serves a day hardly shows what training saved",
            "published",
            records,
        ),
        Finding(
            "total-month",
            "(one run a month of 730 hours)",
            None,
            total(730),
            "ratio",
            "the hourly prices are within 3 %",
            "published",
            records,
        ),
    ]
