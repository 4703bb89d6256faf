"""SkyPilot's catalogue: what its rows mean, and which are of no use."""

from datetime import date
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from portlab_bench.commands_prices import ImportPricesCommand, run_import_prices
from portlab_bench.skypilot import COLUMNS, Imported, parse_catalogue, read_catalogue
from portlab_spec.errors import UserError
from portlab_spec.prices import find_price, load_prices

HEAD = ",".join(COLUMNS)
DAY = date(2026, 8, 1)


def parse(*rows: str, provider: str = "google") -> Imported:
    return parse_catalogue([HEAD, *rows], provider=provider, as_of=DAY, source="a catalogue, v8", where="vms.csv")


def test_slices_become_chips() -> None:
    found = parse(
        "TPU-VM,240,1440,tpu-v6e-8,1,tpu-v6e-8,us-east5,us-east5-b,21.6,9.72",
        "TPU-VM,,,tpu-v5p-8,1,tpu-v5p-8,us-east5,us-east5-a,16.8,6.72",  # 8 cores are 4 chips
        "TPU-VM,,,tpu-v5litepod-4,1,,us-west4,us-west4-a,4.8,2.3116",
    ).prices
    each = {(p.sku, p.plan): p.usd_per_hour for p in found}
    assert each == {
        ("v6e", "on_demand"): 2.7,
        ("v6e", "spot"): 1.215,
        ("v5p", "on_demand"): 4.2,
        ("v5p", "spot"): 1.68,
        ("v5e", "on_demand"): 1.2,
        ("v5e", "spot"): 0.5779,
    }
    assert {p.unit for p in found} == {"chip"}
    assert {p.as_of for p in found} == {DAY}


def test_sentinels_and_repeats_are_left_out() -> None:
    found = parse(
        ",,,tpu-v6e-8,1,,us-east1,us-east1-a,700.0,4.35",
        ",,,tpu-v6e-8,1,,us-east1,us-east1-b,21.6,4.35",
        ",,,tpu-v6e-16,1,,us-east1,us-east1-b,43.2,8.7",  # the same price of a chip
    )
    assert len(found.prices) == 2
    assert found.skipped == {"700.0 stands for an unknown price": 1, "the same price again": 3}


def test_other_zones_with_other_prices_are_kept() -> None:
    found = parse(",,,tpu-v6e-8,1,,us-east1,a,21.6,", ",,,tpu-v6e-8,1,,us-east1,b,24.0,")
    assert [p.usd_per_hour for p in found.prices] == [2.7, 3.0]


def test_google_gpus_are_halves_and_left_out() -> None:
    found = parse(
        "a3-highgpu-8g,208,1872,H100,8,,us-central1,us-central1-a,9.46,3.0", ",,,H100,8,,us-central1,a,78.0,30.0"
    )
    assert found.prices == ()
    assert found.skipped == {"a GPU without its machine, or a machine without its GPU": 4}


def test_whole_machines_are_divided_by_their_gpus() -> None:
    found = parse("p5.48xlarge,192,2048,H100,8,,us-east-1,us-east-1a,55.04,", provider="aws")
    (price,) = found.prices
    assert (price.sku, price.unit, price.usd_per_hour) == ("h100", "gpu", 6.88)


def test_what_is_not_described_is_counted() -> None:
    found = parse(
        "n2-standard-8,8,32,,,,us-central1,a,0.38,0.09",
        ",,,tpu-v2-8,1,,us-central1,a,4.5,1.3",
        ",,,MI300X,8,,us-central1,a,20,",
        ",,,tpu-v6e-8,1,,,a,21.6,",
    )
    assert found.prices == ()
    assert found.skipped == {
        "no accelerator": 2,
        "a slice that is not described here": 2,
        "a GPU that is not described here": 1,
        "no region": 1,
    }


@pytest.mark.parametrize("bad", ["0", "-1", "nan", "inf", "abc", "1,2"])
def test_a_number_that_is_none_refuses_the_file(bad: str) -> None:
    field = f'"{bad}"' if "," in bad else bad
    with pytest.raises(UserError, match=r"line 3, Price"):
        parse(",,,tpu-v6e-8,1,,us-east1,a,21.6,", f",,,tpu-v6e-8,1,,us-east1,a,{field},")


def test_cut_off_and_foreign_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"line 2.*3 fields for 10"):
        parse("a,b,c")
    with pytest.raises(UserError, match="SpotPrice are missing"):
        parse_catalogue([HEAD.removesuffix(",SpotPrice")], provider="google", as_of=DAY, source="s" * 9, where="x")
    with pytest.raises(UserError, match="missing"):
        parse_catalogue([], provider="google", as_of=DAY, source="somewhere", where="x")
    with pytest.raises(UserError, match="not found"):
        read_catalogue(tmp_path / "no.csv", provider="google", as_of=DAY, source="somewhere")
    path = tmp_path / "binary.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(UserError, match="no text"):
        read_catalogue(path, provider="google", as_of=DAY, source="somewhere")
    path.write_text(HEAD + "\n")
    with pytest.raises(UserError, match="no rows"):
        read_catalogue(path, provider="google", as_of=DAY, source="somewhere")


def test_the_command_writes_what_price_lists_are_read_from(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, out = tmp_path / "vms.csv", tmp_path / "prices.json"
    path.write_text(f"{HEAD}\n,,,tpu-v6e-8,1,,us-east1,a,21.6,4.35\nn2,8,32,,,,us-east1,a,0.4,\n")
    command = ImportPricesCommand(path, "2026-08-01", "github.com/skypilot-org/skypilot-catalog 006059e", out)
    assert run_import_prices(command) == 0
    assert "1 left out: no accelerator" in capsys.readouterr().out
    assert find_price("v6e", plan="spot", prices=load_prices(out)).usd_per_hour == pytest.approx(0.54375)
    for day, says in (("2026-8-1", "no date"), ("", "no date"), ("2999-01-01", "future")):
        with pytest.raises(UserError, match=says):
            run_import_prices(ImportPricesCommand(path, day, "somewhere", out))


@given(st.lists(st.text(alphabet="tpuv5e68-,.\"'0 naif\n", max_size=60), max_size=5))
def test_any_rows_are_prices_or_one_clear_error(rows: list[str]) -> None:
    try:
        found = parse(*rows)
    except UserError:
        return
    assert all(0 < price.usd_per_hour < 1e6 for price in found.prices)
