"""What collectives send: against rings played out by hand, and compiled for eight devices."""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from eight_devices import on_eight_devices, run_on_eight_devices
from jax.sharding import NamedSharding, PartitionSpec

from portlab_jax.planner.costs import count
from portlab_jax.planner.hlo import parse

SIZE = 256 * 4  # bytes that each device gives


def counted(line, partitions=8):
    """Counts of an entry computation of one collective over an operand of SIZE bytes."""
    return count(
        parse(
            f"HloModule m, num_partitions={partitions}\n\nENTRY %main () -> f32[] {{\n"
            f"  %a = f32[256]{{0}} parameter(0)\n  %b = f32[64]{{0}} parameter(1)\n  ROOT %c = {line}\n}}\n"
        )
    )


def ring_gather(devices):
    """Parts that each device sends until all have all: in each round on to the next what came last."""
    held, last, sent = [{d} for d in range(devices)], list(range(devices)), 0
    while any(len(parts) < devices for parts in held):
        last = [last[d - 1] for d in range(devices)]
        for d in range(devices):
            held[d].add(last[d])
        sent += 1
    return sent


def ring_scatter(devices):
    """Parts that each device sends until each has the sum of one: in each round on to the next a sum of one part."""
    sums, sent = [dict.fromkeys(range(devices), 1) for _ in range(devices)], 0
    while all(sums[d][(d + 1) % devices] < devices for d in range(devices)):
        moving = [((d - sent) % devices, sums[d][(d - sent) % devices]) for d in range(devices)]
        for d in range(devices):
            part, amount = moving[d - 1]
            sums[d][part] += amount
        sent += 1
    return sent


@pytest.mark.parametrize("devices", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("form", ["listed", "iota"])
@pytest.mark.parametrize("started", ["", "-start"])
def test_what_is_sent_is_what_a_ring_sends(devices, form, started):
    inner = ",".join(map(str, range(devices)))
    groups = f"replica_groups={{{{{inner}}}}}" if form == "listed" else f"replica_groups=[1,{devices}]<=[{devices}]"
    gathered = f"f32[{256 * devices}]{{0}}"
    part = SIZE / devices
    expected = {
        f"all-gather{started}": ring_gather(devices) * SIZE,
        f"reduce-scatter{started}": ring_scatter(devices) * part,
        f"all-reduce{started}": (ring_scatter(devices) + ring_gather(devices)) * part,
        f"all-to-all{started}": (devices - 1) * part,
    }
    for kind, sent in expected.items():
        costs = counted(f"{gathered} {kind}(%a), {groups}")
        assert costs.collectives == {kind.removesuffix("-start"): 1}
        assert costs.sent_bytes == int(sent)


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("replica_groups={{0,1,2,3},{4,5,6,7}}", 4),
        ("replica_groups=[4,2]<=[2,4]T(1,0)", 2),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'fsdp'}", 4),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'data','fsdp'}", 8),
        ("replica_groups=mesh['data'=2,'fsdp'=4] {'data','fsdp':(1)2}", 4),
        ("replica_groups={}", 8),
        ("channel_id=1", 8),
    ],
)
def test_a_group_is_found_in_every_form(groups, devices):
    assert counted(f"f32[256]{{0}} all-gather(%a), {groups}").sent_bytes == (devices - 1) * SIZE


def test_a_permutation_sends_all_of_its_operand():
    assert counted("f32[256]{0} collective-permute(%a), source_target_pairs={{0,1},{1,0}}").sent_bytes == SIZE


def test_several_operands_are_sent_together():
    costs = counted("(f32[256]{0}, f32[64]{0}) all-reduce(%a, %b), replica_groups={{0,1}}, to_apply=%add")
    assert (costs.collectives, costs.sent_bytes) == ({"all-reduce": 1}, SIZE + SIZE // 4)


def test_a_done_is_no_second_collective():
    text = (
        "HloModule m, num_partitions=4\n\nENTRY %main () -> f32[] {\n  %a = f32[256]{0} parameter(0)\n"
        "  %s = (f32[256]{0}, f32[1024]{0}) all-gather-start(%a), replica_groups=[1,4]<=[4]\n"
        "  ROOT %d = f32[1024]{0} all-gather-done(%s)\n}\n"
    )
    costs = count(parse(text))
    assert (costs.collectives, costs.sent_bytes) == ({"all-gather": 1}, 3 * SIZE)
    assert costs.bytes == SIZE + 4 * SIZE


def inside(function, spec, shape=(64, 32)):
    """Counts of a function of one device's part, compiled for 8 devices as 2 x 4."""
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"))
    x = jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    mapped = jax.shard_map(function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    return count(parse(jax.jit(mapped).lower(x).compile().as_text()))


ROWS = PartitionSpec(("data", "fsdp"))
PART = 64 * 32 * 4 // 8  # bytes of a device's part


@on_eight_devices
@pytest.mark.parametrize(
    ("function", "kind", "sent"),
    [
        (partial(jax.lax.psum, axis_name="fsdp"), "all-reduce", 2 * PART * 3 // 4),
        (partial(jax.lax.psum, axis_name=("data", "fsdp")), "all-reduce", 2 * PART * 7 // 8),
        (lambda x: jax.lax.all_gather(x, "fsdp").sum(0), "all-gather", PART * 3),
        (
            lambda x: jnp.tile(jax.lax.psum_scatter(x, "fsdp", scatter_dimension=0, tiled=True), (4, 1)),
            "reduce-scatter",
            PART * 3 // 4,
        ),
        (
            lambda x: jax.lax.all_to_all(x, "fsdp", split_axis=0, concat_axis=0, tiled=True),
            "all-to-all",
            PART * 3 // 4,
        ),
        (
            partial(jax.lax.ppermute, axis_name="fsdp", perm=[(i, (i + 1) % 4) for i in range(4)]),
            "collective-permute",
            PART,
        ),
    ],
    ids=["psum", "psum of all", "all_gather", "psum_scatter", "all_to_all", "ppermute"],
)
def test_compiled_collectives_are_counted(function, kind, sent):
    costs = inside(function, ROWS)
    assert costs.collectives == {kind: 1}
    assert costs.sent == {kind: sent}


@on_eight_devices
def test_compiled_collectives_in_a_loop_count_each_round():
    def rounds(x):
        return jax.lax.fori_loop(0, 5, lambda _, h: jnp.tanh(jax.lax.psum(h, "data")), x)

    costs = inside(rounds, ROWS)
    assert costs.collectives == {"all-reduce": 5}
    assert costs.sent_bytes == 5 * 2 * PART // 2


@on_eight_devices
def test_compiled_products_are_counted_for_one_device():
    mesh = jax.make_mesh((2, 4), ("data", "fsdp"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    x, w = (
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, PartitionSpec(*spec)))
        for shape, spec in [((64, 32), (("data", "fsdp"), None)), ((32, 16), (None, None))]
    )
    assert count(parse(jax.jit(jnp.matmul).lower(x, w).compile().as_text())).flops == 2 * 64 * 32 * 16 / 8


def test_on_eight_devices():
    assert "8 passed" in run_on_eight_devices(__file__, "-k", "compiled")
