"""On every mesh the same loss and gradients as on one device, and every array cut as the table of parameters says.

The models have the shapes that make tensor parallelism hard: fewer key/value heads than `tp`, in all layers (E4B) or in
full ones alone (12B, 26B-A4B, 31B), fewer query heads than `tp`, experts.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eight_devices import on_eight_devices, run_on_eight_devices
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from portlab_jax.experts import mix
from portlab_jax.lora import AdapterOptions, Low, adapter_shardings, init_adapter
from portlab_jax.mesh import MeshPlan, partition
from portlab_jax.optim import make_optimizer
from portlab_jax.step import StepOptions, gradients
from portlab_jax.weights import abstract_params, random_params
from portlab_spec.models import FULL, SLIDING, GemmaConfig, param_table, plan_adapter
from portlab_spec.recipe import Lora, Mesh, Optimizer

BASE = {
    "model_type": "gemma4_text",
    "vocab_size": 96,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "head_dim": 8,
    "global_head_dim": 16,
    "sliding_window": 6,
    "layer_types": [SLIDING, SLIDING, FULL] * 2,
    "final_logit_softcapping": 30.0,
    "hidden_size_per_layer_input": 0,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "final_logit_softcapping": None,
    "num_key_value_heads": 2,
    "query_pre_attn_scalar": 8,
}
MODELS = {
    "gemma3": GEMMA3,
    "gemma3, four heads": GEMMA3 | {"num_attention_heads": 4},
    "12B": {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    "31B": {"attention_k_eq_v": True, "num_global_key_value_heads": 4},
    "E4B": {
        "num_key_value_heads": 2,
        "hidden_size_per_layer_input": 8,
        "vocab_size_per_layer_input": 96,
        "num_kv_shared_layers": 3,
    },
    "26B-A4B": {
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 2,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
}
# (data, fsdp, tp). 12B's one head does not divide by any tp. Each is a compilation for 8 devices; those that meet
# nothing new are for the long run.
CASES = [
    ("gemma3, four heads", (1, 1, 8)),
    ("12B", (2, 2, 2)),
    ("E4B", (1, 2, 4)),
    ("26B-A4B", (2, 2, 2)),
    *(
        pytest.param(name, sizes, marks=pytest.mark.slow)
        for name, sizes in [
            ("gemma3", (1, 8, 1)),
            ("gemma3", (8, 1, 1)),
            ("gemma3", (2, 2, 2)),
            ("12B", (1, 1, 8)),
            ("31B", (1, 1, 8)),
            ("E4B", (1, 8, 1)),
            ("E4B", (2, 2, 2)),
            ("26B-A4B", (8, 1, 1)),
            ("26B-A4B", (1, 8, 1)),
            ("26B-A4B", (1, 2, 4)),
        ]
    ),
]
TOKEN_IDS = (3, 5)
# Norm-relative. Float32 sums in another order differ by up to 2.6e-5 here; what a part forgets is of order 1.
TOLERANCE = 3e-5


def soften(params):
    """Attention of random weights is so sharp that rounding grows a hundredfold on its way through the layers."""
    for stack in params["layers"].values():
        stack["self_attn.q_norm"] = stack["self_attn.q_norm"] * 0.25
    return params


def without_scalars(params):
    """(weights, layer scalars): the last scalar, in front of a norm, has a gradient of rounding errors alone."""
    scalars = {name: {"layer_scalar": w["layer_scalar"]} for name, w in params["layers"].items() if "layer_scalar" in w}
    layers = {name: {k: w for k, w in stack.items() if k != "layer_scalar"} for name, stack in params["layers"].items()}
    return params | {"layers": layers}, {"layers": scalars}


class Run:
    """A random model on a mesh, an adapter that has moved, a batch and the gradients of a step.

    Numbers are drawn when they are asked for: where things lie is known without.
    """

    def __init__(self, name, sizes, rows, packed, *, full=False, count=8):
        data, fsdp, tp = sizes
        self.config = GemmaConfig.from_dict(BASE | MODELS[name])
        self.mesh = MeshPlan.create(Mesh(data=data, fsdp=fsdp, tp=tp), jax.devices()[:count])
        targets = [*Lora().targets]
        targets += ["per_layer_input_gate", "per_layer_projection"] if self.config.per_layer else []
        targets += ["experts.gate_up_proj", "experts.down_proj"] if self.config.experts else []
        self.full = full
        self.leaves = () if full else plan_adapter(self.config, Lora(rank=4, targets=targets))
        self.options = StepOptions(
            self.config, AdapterOptions(self.leaves, token_ids=() if full else TOKEN_IDS), full=full
        )
        self.shardings = adapter_shardings(self.leaves, self.mesh, TOKEN_IDS)
        batch, self.chunk = packed(rows, self.config, groups=self.mesh.groups)
        with jax.set_mesh(self.mesh.mesh):
            self.batch = self.mesh.put_rows(batch, axis=1)
        self.params = abstract_params(self.config, jnp.float32, self.mesh)

    def init(self, key, embedding):
        return init_adapter(self.leaves, key, embedding=embedding, token_ids=TOKEN_IDS)

    def adapter(self):
        """Shapes and places of an adapter."""
        with jax.set_mesh(self.mesh.mesh):
            shapes = jax.eval_shape(self.init, jax.random.key(1), self.params["embed_tokens"])
        return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), shapes, self.shardings)

    def draw(self):
        """What is trained, and what is not: weights, and an adapter that has moved."""
        params = soften(random_params(self.config, jnp.float32, self.mesh, jax.random.key(0)))
        if self.full:
            return without_scalars(params)
        rng = np.random.default_rng(2)
        fresh = jax.device_get(self.init(jax.random.key(1), params["embed_tokens"]))
        moved = jax.tree.map(lambda leaf: leaf + 0.1 * rng.normal(size=leaf.shape).astype(np.float32), fresh)
        return jax.device_put(moved, self.shardings), params

    def gradients(self):
        """Mean loss, and gradients as they lie on the devices."""
        with jax.set_mesh(self.mesh.mesh):
            trained, frozen = self.draw()
            step = jax.jit(gradients, static_argnames=("options", "chunk"))
            sums, total, grads = step(trained, frozen, self.batch, options=self.options, chunk=self.chunk)
            assert_placed(grads, trained)
            return float(sums.loss / total), grads

    def jaxpr(self):
        with jax.set_mesh(self.mesh.mesh):
            return jax.make_jaxpr(gradients, static_argnums=(3, 4))(
                self.adapter(), self.params, self.batch, self.options, self.chunk
            )


@pytest.fixture(scope="module")
def run(make_rows, packed):
    """Makes (once) a model on a mesh."""
    made = {}

    def get(name, sizes, *, full=False):
        key = (name, sizes, full)
        if key not in made:
            rows = make_rows(n=8, prefix=9, trained=TOKEN_IDS)
            made[key] = Run(name, sizes, rows, packed, full=full, count=int(np.prod(sizes)))
        return made[key]

    return get


@pytest.fixture(scope="module")
def on_one_device(run):
    """The result on a mesh of one device."""
    made = {}

    def get(name, *, full=False):
        if (name, full) not in made:
            loss, grads = run(name, (1, 1, 1), full=full).gradients()
            made[name, full] = loss, jax.device_get(grads)
        return made[name, full]

    return get


def assert_same(found, expected):
    assert found[0] == pytest.approx(expected[0], rel=1e-5)
    errors = {
        jax.tree_util.keystr(path, simple=True, separator="/"): np.linalg.norm(np.asarray(x) - y) / np.linalg.norm(y)
        for (path, x), y in zip(jax.tree.leaves_with_path(found[1]), jax.tree.leaves(expected[1]), strict=True)
    }
    assert {path: error for path, error in errors.items() if error > TOLERANCE} == {}


def assert_placed(found, like):
    """Each leaf is cut as the leaf that it belongs to."""
    for (path, x), y in zip(jax.tree.leaves_with_path(found), jax.tree.leaves(like), strict=True):
        wanted = y if isinstance(y, jax.sharding.Sharding) else y.sharding
        assert x.sharding.is_equivalent_to(wanted, x.ndim), (jax.tree_util.keystr(path), x.sharding.spec, wanted.spec)


def name_of(value):
    return "x".join(map(str, value)) if isinstance(value, tuple) else value


# --- results


@on_eight_devices
@pytest.mark.parametrize(("name", "sizes"), CASES, ids=name_of)
def test_mesh_changes_neither_loss_nor_gradients(run, on_one_device, name, sizes):
    assert_same(run(name, sizes).gradients(), on_one_device(name))


@on_eight_devices
@pytest.mark.parametrize(
    "name", ["26B-A4B", *(pytest.param(name, marks=pytest.mark.slow) for name in ("gemma3", "E4B"))]
)
def test_mesh_changes_no_gradient_of_full_fine_tuning(run, on_one_device, name):
    assert_same(run(name, (2, 2, 2), full=True).gradients(), on_one_device(name, full=True))


# --- where arrays lie


@on_eight_devices
def test_mesh_cuts_weights_as_the_table_says(run):
    layers = run("26B-A4B", (2, 2, 2)).params["layers"]["full"]
    specs = {name: leaf.sharding.spec for name, leaf in layers.items()}
    assert specs["self_attn.q_proj"] == P(None, "tp", "fsdp")
    assert specs["self_attn.k_proj"] == P(None, "tp", "fsdp")
    assert specs["self_attn.o_proj"] == P(None, "fsdp", "tp")
    assert specs["mlp.down_proj"] == P(None, "fsdp", "tp")
    assert specs["experts.gate_up_proj"] == P(None, "tp", None, "fsdp")
    assert specs["experts.down_proj"] == P(None, "tp", "fsdp", None)
    assert specs["router.proj"] == P(None, None, "fsdp")
    assert specs["input_layernorm"] == P(None, None)
    assert run("26B-A4B", (2, 2, 2)).params["embed_tokens"].sharding.spec == P("tp", "fsdp")


@on_eight_devices
@pytest.mark.parametrize("name", ["gemma3", "12B", "E4B", "26B-A4B"])
def test_mesh_leaves_no_large_weight_whole(run, name):
    """Every matrix is cut over fsdp, and over tp where it has heads, an MLP, experts or a vocabulary."""
    here = run(name, (2, 2, 2))
    for param in param_table(here.config):
        leaf = here.params["layers"][param.stack][param.name] if param.stack else here.params[param.name]
        for dim, entry in zip(param.dims, leaf.sharding.spec[-len(param.dims) :], strict=True):
            axis = {None: None, "embed": "fsdp"}.get(dim.axis, "tp")
            assert entry == (axis if dim.parts % 2 == 0 else None), (param.key, dim)
        if len(param.dims) > 1:
            assert "fsdp" in leaf.sharding.spec, param.key


@on_eight_devices
@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_mesh_cuts_adapter_and_optimizer_state_as_their_weights(run, optimizer):
    here = run("26B-A4B", (2, 2, 2))
    adapter = jax.tree.map(lambda x: jax.device_put(np.zeros(x.shape, x.dtype), x.sharding), here.adapter())
    specs = {key: (pair["a"].sharding.spec, pair["b"].sharding.spec) for key, pair in adapter["lora"].items()}
    assert specs["sliding.self_attn.q_proj"] == (P(None, "fsdp", None), P(None, None, "tp"))
    assert specs["sliding.self_attn.o_proj"] == (P(None, "tp", None), P(None, None, "fsdp"))
    assert specs["sliding.mlp.down_proj"] == (P(None, "tp", None), P(None, None, "fsdp"))
    assert specs["full.experts.gate_up_proj"] == (P(None, "tp", "fsdp", None), P(None, "tp", None, None))
    assert specs["full.experts.down_proj"] == (P(None, "tp", None, None), P(None, "tp", None, "fsdp"))
    with jax.set_mesh(here.mesh.mesh):
        state = jax.jit(make_optimizer(Optimizer(name=optimizer), 10).init)(adapter)
    moments = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim > 1]
    count = 2 if optimizer == "adamw" else 1
    assert_placed(moments, jax.tree.leaves(adapter) * count)


def named_activations(jaxpr):
    """(name, partition) of every checkpoint name in a program and its loops; inside shard_map all is local."""
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "name":
            yield eqn.params["name"], eqn.outvars[0].aval.sharding.spec
        for value in eqn.params.values() if eqn.primitive.name != "shard_map" else ():
            for inner in value if isinstance(value, (tuple, list)) else (value,):
                if hasattr(inner := getattr(inner, "jaxpr", inner), "eqns"):
                    yield from named_activations(inner)


@on_eight_devices
@pytest.mark.parametrize("name", ["gemma3", "12B", "E4B", "26B-A4B"])
def test_mesh_cuts_activations_by_rows_heads_and_mlp(run, name):
    here = run(name, (2, 2, 2))
    group = ("data", "fsdp")
    found = {}
    for activation, spec in named_activations(here.jaxpr().jaxpr):
        found.setdefault(activation, set()).add(spec)
    assert found["embedded"] == found["layer_input"] == found["residual"] == {P(group, None, None)}
    # The per-layer inputs of the E-series are as narrow as they are few: they are not cut.
    assert found["gated"] == {P(group, None, "tp")} | ({P(group, None, None)} if here.config.per_layer else set())
    whole = any(kind.kv_heads % 2 for kind in here.config.layers)
    assert found["rotated"] == {P(group, None, "tp", None)} | ({P(group, None, None, None)} if whole else set())


@on_eight_devices
@pytest.mark.parametrize("sizes", [(2, 1, 2), (1, 2, 4), (1, 1, 3)], ids=name_of)
def test_mesh_changes_no_gradient_of_the_experts(rng, sizes):
    """Tokens are picked by experts that differ from part to part: each part has but a share of their gradients."""
    g, n, d, f, e, k = 2, 6, 8, 5, 4, 2

    def normal(*shape):
        return rng.normal(size=shape).astype(np.float32)

    chosen = np.argsort(normal(g, n, e), axis=-1)[..., :k].astype(np.int32)
    tokens = normal(g, n, d), np.abs(normal(g, n, k))
    weights = {"experts.gate_up_proj": normal(e, 2 * f, d), "experts.down_proj": normal(e, d, f)}
    low = {
        "experts.gate_up_proj": Low(normal(e, d, 2), normal(e, 2, 2 * f)),
        "experts.down_proj": Low(normal(e, f, 2), normal(e, 2, d)),
    }
    d_out = normal(g, n, d)

    def differentiated(sizes):
        data, fsdp, tp = sizes
        mesh = MeshPlan.create(Mesh(data=data, fsdp=fsdp, tp=tp), jax.devices()[: data * fsdp * tp])

        def loss(tokens, weights, low, chosen, d_out):
            x, shares = tokens
            return jnp.sum(mix(x, chosen, shares, weights, low) * d_out)

        def put(tree, *axes):
            return jax.tree.map(lambda x: jax.device_put(x, shard_of(x, axes)), tree)

        def shard_of(x, axes):
            with jax.set_mesh(mesh.mesh):
                return NamedSharding(mesh.mesh, partition((*axes, *(None,) * (x.ndim - 1)), x.shape))

        with jax.set_mesh(mesh.mesh):
            step = jax.jit(jax.value_and_grad(loss, argnums=(0, 1, 2)))
            return jax.device_get(
                step(
                    put(tokens, "group"),
                    put(weights, "experts"),
                    put(low, "experts"),
                    put(chosen, "group"),
                    put(d_out, "group"),
                )
            )

    assert_same(differentiated(sizes), differentiated((1, 1, 1)))


# --- what cannot be cut


@on_eight_devices
@pytest.mark.parametrize(
    ("name", "sizes", "notes"),
    [
        ("gemma3", (2, 2, 2), []),
        ("E4B", (1, 2, 4), ["2 kv heads cannot be cut 4 ways over tp: replicated"]),
        ("26B-A4B", (1, 2, 4), ["2 kv heads cannot be cut 4 ways over tp: replicated"]),
        ("31B", (1, 1, 8), ["4 kv heads cannot be cut 8 ways over tp: replicated"]),
        ("12B", (2, 2, 2), ["1 kv heads cannot be cut 2 ways over tp: replicated"]),
        (
            "gemma3, four heads",
            (1, 1, 8),
            [
                "4 heads cannot be cut 8 ways over tp: replicated",
                "2 kv heads cannot be cut 8 ways over tp: replicated",
            ],
        ),
    ],
    ids=name_of,
)
def test_mesh_says_what_it_replicates(run, name, sizes, notes):
    here = run(name, sizes)
    assert here.mesh.replications(param_table(here.config)) == notes


def test_on_eight_devices():
    assert "1 skipped" in run_on_eight_devices(__file__, "-m", "not slow")
