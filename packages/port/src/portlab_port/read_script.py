"""Python scripts and notebooks that build a trainer: parsed, never run."""

import ast
import json
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

from portlab_port.collect import Entry, complete
from portlab_port.dialects import TRL, UNSLOTH
from portlab_port.dialects.calls import AUTO_MODEL, BITS_AND_BYTES, TRAINER_CALL, TRAINER_CONFIG
from portlab_port.dialects.table import Dialect, Key
from portlab_port.dialects.trl import HF_DEFAULTS, PEFT_DEFAULTS, SFT_DEFAULTS
from portlab_port.dialects.unsloth import FAST_MODEL, LORA_CONFIG, UNSLOTH_DEFAULTS
from portlab_port.literals import Script, callee, live_nodes
from portlab_port.settings import Computed, GpuRecipe, Style
from portlab_spec.errors import UserError

_CONFIGS = (
    "SFTConfig",
    "TrainingArguments",
    "Seq2SeqTrainingArguments",
    "UnslothTrainingArguments",
    "SFTScriptArguments",
)
_SFT_TRAINERS = ("SFTTrainer", "Trainer", "Seq2SeqTrainer", "UnslothTrainer")
_PARSERS = ("TrlParser", "HfArgumentParser", "ArgumentParser")
_QUANTIZERS = ("GPTQConfig", "AwqConfig", "AWQConfig", "HqqConfig", "TorchAoConfig", "Mxfp4Config", "QuantoConfig")
_OTHER_PEFT = ("IA3Config", "PrefixTuningConfig", "PromptTuningConfig", "LoHaConfig", "LoKrConfig", "OFTConfig",
               "BOFTConfig", "VeraConfig", "AdaLoraConfig", "PromptEncoderConfig", "XLoraConfig")  # fmt: skip
_MODEL_ENDS = ("ForCausalLM", "ForConditionalGeneration", "ForImageTextToText", "Model")
# Objects that connect the calls: they hold no settings of their own.
_OBJECTS = frozenset({
    "model", "args", "tokenizer", "processing_class", "train_dataset", "peft_config", "callbacks",
    "quantization_config", "config", "auto_model", "unsloth_tiled_mlp",
})  # fmt: skip
_READ_APART = ("eval_dataset", "formatting_func", "compute_loss_func", "optimizers", "optimizer_cls_and_kwargs",
               "data_collator")  # fmt: skip
# Attributes of tokenizers and models that scripts set by hand.
_ATTRIBUTES = {
    "pad_token": Key("pad_token"), "pad_token_id": Key("pad_token"), "eos_token": Key("eos_token"),
    "padding_side": Key("padding_side"), "use_cache": Key("use_cache"), "chat_template": Key("chat_template"),
}  # fmt: skip
# Names that values by hand may have.
KEYS = {**UNSLOTH.keys, **TRL.keys, **LORA_CONFIG}
_SCRIPT = Dialect(
    style="script", keys={}, prefixes={}, defaults={}, defaults_of="TRL", lora_defaults=PEFT_DEFAULTS,
    lora_defaults_of="PEFT",
)  # fmt: skip


def read_script(text: str, source: str, by_hand: Mapping[str, Any] | None = None) -> GpuRecipe:
    """Settings of the one trainer that a script builds, with its libraries' defaults.

    Args:
        text: Python source.
        source: its name, for messages.
        by_hand: values in place of the script's, which need not be known then.

    Raises:
        UserError: no Python, no trainer or several, two configurations of one kind, arguments that only running the
            script would tell.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about the script's own literals
            tree = ast.parse(text)
        script = Script(tree)
        calls = [node for node in live_nodes(tree) if isinstance(node, ast.Call)]
        reader = _Reader(script, source, sorted(calls, key=lambda call: (call.lineno, call.col_offset)))
        entries = list(reader.entries())
    except SyntaxError as error:
        raise UserError(
            f"is not Python ({error.msg}, line {error.lineno})", where=source, fix="Mend the file"
        ) from None
    except (RecursionError, MemoryError, ValueError) as error:
        raise UserError(f"is no script that can be read ({error})", where=source, fix="Mend the file") from None
    style: Style = "unsloth" if reader.unsloth else "script"
    return complete(style, source, entries, reader.dialect(), KEYS, by_hand or {})


def notebook_code(text: str, source: str) -> str:
    """The code cells of a notebook as one script; magics and shell lines become comments.

    Raises:
        UserError: no notebook.
    """
    try:
        cells = json.loads(text)["cells"]
        code = ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]
    except (ValueError, KeyError, TypeError, RecursionError):
        raise UserError("is no notebook", where=source, fix="Check the file") from None
    return "\n\n".join(_without_magics(cell) for cell in code)


def _without_magics(cell: str) -> str:
    lines = cell.splitlines()
    first = next((line for line in lines if line.strip()), "")
    whole = first.startswith("%%") and not first.startswith(("%%capture", "%%time"))
    return "\n".join(f"# {line}" if whole or line.lstrip().startswith(("%", "!")) else line for line in lines)


class _Reader:
    """The calls of a script that hold settings."""

    def __init__(self, script: Script, source: str, calls: list[ast.Call]) -> None:
        self._script = script
        self._source = source
        self._calls = calls
        self.unsloth = any(_imports(node, "unsloth") for node in ast.walk(script.tree))
        self._classes = {node.name for node in ast.walk(script.tree) if isinstance(node, ast.ClassDef)}
        self._trainer = self._one_trainer()
        self._config: ast.Call | None = None

    def dialect(self) -> Dialect:
        """The defaults of the libraries that the script calls."""
        if self.unsloth:
            return replace(UNSLOTH, defaults=UNSLOTH_DEFAULTS)
        if self._config is not None and callee(self._config) != "SFTConfig":
            sft = callee(self._trainer) == "SFTTrainer"
            defaults = {**HF_DEFAULTS, **({"max_length": 1024} if sft else {})}
            return replace(_SCRIPT, defaults=defaults, defaults_of="transformers and TRL")
        return replace(_SCRIPT, defaults=SFT_DEFAULTS)

    def entries(self) -> Iterator[Entry]:
        """Everything that the script says about its run."""
        self._config = self._one("trainer configuration", [c for c in self._calls if callee(c) in _CONFIGS])
        lora = self._one(
            "adapter", [c for c in self._calls if callee(c) == "LoraConfig" or _is_fast(c, "get_peft_model")]
        )
        loaders = [c for c in self._calls if _is_fast(c, "from_pretrained") or _is_model(c)]
        loader = self._one("model", loaders)
        bits = self._one("quantisation", [c for c in self._calls if callee(c) == "BitsAndBytesConfig"])
        if self._config is None and any(callee(c) in _PARSERS for c in self._calls) and lora is None:
            raise UserError(
                "takes its settings from a command line", where=self._source,
                fix="Give a file with the command (--style command), or the YAML that it reads",
            )  # fmt: skip
        if self._config is not None:
            yield from self._arguments(self._config, TRAINER_CONFIG, ("output_dir",))
            yield from self._assigned_to(self._config)
        if lora is not None:
            yield Entry(callee(lora), True, self._where(lora), Key("use_lora"))
            yield from self._arguments(lora, LORA_CONFIG, ())
        if loader is not None:
            fast = _is_fast(loader, "from_pretrained")
            table = FAST_MODEL if fast else AUTO_MODEL
            yield from self._arguments(loader, table, ("model_name",) if fast else ("pretrained_model_name_or_path",))
        if bits is not None:
            yield from self._arguments(bits, BITS_AND_BYTES, ("load_in_8bit", "load_in_4bit"))
            if not any(k.arg in ("bnb_4bit_quant_type", None) for k in bits.keywords):
                yield Entry("bnb_4bit_quant_type", "fp4", self._where(bits), Key("bnb_4bit_quant_type"))
        yield from self._of_trainer()
        yield from self._others()
        used = {id(call) for call in (lora, loader, bits)}
        for call in loaders:
            if id(call) not in used:
                yield Entry(f"{callee(call)}()", f"line {call.lineno}", self._where(call), Key("not_training"))

    def _one_trainer(self) -> ast.Call:
        trainers = [
            c for c in self._calls if callee(c).endswith("Trainer") and isinstance(c.func, ast.Name | ast.Attribute)
        ]
        if len(trainers) > 1:
            lines = ", ".join(f"{callee(c)} in line {c.lineno}" for c in trainers)
            raise UserError(f"builds several trainers: {lines}", where=self._source, fix="Port one: remove the others")
        if not trainers:
            raise UserError(
                "builds no trainer that is known (SFTTrainer, Trainer)", where=self._source,
                fix="Give the script that trains, its command line, or its YAML",
            )  # fmt: skip
        return trainers[0]

    def _one(self, what: str, calls: list[ast.Call]) -> ast.Call | None:
        """The call of a kind that the training uses: the only one, or the only one up to the trainer."""
        if len(calls) > 1:
            end = self._trainer.end_lineno or self._trainer.lineno
            calls = [call for call in calls if call.lineno <= end] or calls
        if len(calls) > 1:
            lines = ", ".join(f"{callee(call)} in line {call.lineno}" for call in calls)
            raise UserError(f"holds more than one {what}: {lines}", where=self._source, fix="Keep the one that trains")
        return calls[0] if calls else None

    def _arguments(self, call: ast.Call, table: Mapping[str, Key], positional: tuple[str, ...]) -> Iterator[Entry]:
        where = self._where(call)
        own = 1 if callee(call) == "get_peft_model" else 0
        for name, node in zip(positional, call.args[own:], strict=False):
            yield Entry(name, self._script.value(node), f"{self._source}:{node.lineno}", table.get(name))
        for keyword in call.keywords:
            if keyword.arg is None:
                found = self._script.mapping(keyword.value)
                if isinstance(found, Computed):
                    raise UserError(
                        f"what **{found} holds is not known without running it ({found.why})",
                        where=f"{self._source}:{keyword.value.lineno}", fix="Write the arguments out",
                    )  # fmt: skip
                for key, value in found.items():
                    if key not in _OBJECTS:
                        yield Entry(key, value, where, _look(table, key))
            elif keyword.arg == "model_init_kwargs" and isinstance(found := self._script.value(keyword.value), dict):
                for key, value in found.items():
                    if key not in _OBJECTS:
                        yield Entry(f"model_init_kwargs.{key}", value, where, AUTO_MODEL.get(key))
            elif keyword.arg not in _OBJECTS:
                yield Entry(keyword.arg, self._script.value(keyword.value), f"{self._source}:{keyword.value.lineno}",
                            _look(table, keyword.arg))  # fmt: skip

    def _assigned_to(self, config: ast.Call) -> Iterator[Entry]:
        """`args.learning_rate = ...` behind the configuration: refused, as the order of execution decides."""
        names = {t.id for node in ast.walk(self._script.tree) if isinstance(node, ast.Assign) and node.value is config
                 for t in node.targets if isinstance(t, ast.Name)}  # fmt: skip
        for node in live_nodes(self._script.tree):
            match node:
                case ast.Assign(targets=[ast.Attribute(value=ast.Name(id=name), attr=key)], value=value) if (
                    name in names
                ):
                    yield Entry(key, self._script.value(value), f"{self._source}:{node.lineno}",
                                _look(TRAINER_CONFIG, key))  # fmt: skip

    def _of_trainer(self) -> Iterator[Entry]:
        trainer, kind = self._trainer, callee(self._trainer)
        if kind not in _SFT_TRAINERS:
            yield Entry(kind, kind, self._where(trainer), Key("other_loss"))
        for keyword in trainer.keywords:
            where = f"{self._source}:{keyword.value.lineno}"
            value = self._script.value(keyword.value)
            match keyword.arg:
                case "model" if isinstance(value, str):
                    yield Entry("model", value, where, Key("model"))
                case "eval_dataset" if value is not None:
                    yield Entry("eval_dataset", ast.unparse(keyword.value), where, Key("eval_dataset"))
                case "formatting_func" if value is not None:
                    yield Entry("formatting_func", ast.unparse(keyword.value), where, Key("formatting_func"))
                case "compute_loss_func" if value is not None:
                    yield Entry("compute_loss_func", ast.unparse(keyword.value), where, Key("other_loss"))
                case "optimizers" | "optimizer_cls_and_kwargs" if value is not None:
                    yield Entry(keyword.arg, ast.unparse(keyword.value), where, Key("optim_args"))
                case "data_collator" if value is not None:
                    yield Entry("data_collator", ast.unparse(keyword.value), where, Key("data_collator"))
                case None:
                    yield Entry(f"**{ast.unparse(keyword.value)}", "not read", where, None)
                case key if key not in _OBJECTS and key not in _READ_APART:
                    yield Entry(str(key), value, where, TRAINER_CALL.get(str(key)))

    def _others(self) -> Iterator[Entry]:
        datasets: dict[str, str] = {}
        for call in self._calls:
            name, where = callee(call), self._where(call)
            keywords = {k.arg: self._script.value(k.value) for k in call.keywords if k.arg}
            positional = [self._script.value(argument) for argument in call.args]
            if name == "load_dataset":
                yield from self._dataset(keywords, positional, where, datasets)
            elif name == "train_on_responses_only" or name == "DataCollatorForCompletionOnlyLM":
                yield Entry(name, True, where, Key("completion_only_loss"))
            elif name == "get_chat_template" and "chat_template" in keywords:
                yield Entry("chat_template", keywords["chat_template"], where, Key("chat_template"))
            elif name == "EarlyStoppingCallback":
                patience = keywords.get("early_stopping_patience", positional[0] if positional else 1)
                yield Entry("early_stopping_patience", patience, where, Key("early_stopping_patience"))
            elif name == "prepare_model_for_kbit_training":
                yield Entry(name, True, where, Key("prepare_model_for_kbit_training"))
            elif name == "train_test_split" and "test_size" in keywords:
                yield Entry("test_size", keywords["test_size"], where, Key("val_set_size"))
            elif name == "from_pretrained" and _owner(call) == "PeftModel" and call.lineno < self._trainer.lineno:
                path = positional[1] if len(positional) > 1 else keywords.get("model_id")
                yield Entry("PeftModel.from_pretrained", path, where, Key("start_from"))
            elif name == "compile" and _owner(call) == "torch":
                yield Entry("torch.compile", True, where, Key("torch_compile"))
            elif name in _QUANTIZERS:
                yield Entry(name, name, where, Key("other_quantization"))
            elif name in _OTHER_PEFT:
                yield Entry(name, name, where, Key("other_peft"))
            elif name in ("add_special_tokens", "add_tokens", "setup_chat_format"):
                yield Entry(name, name, where, Key("added_tokens"))
        if datasets:
            where = next(iter(datasets.values()))
            yield Entry(
                "load_dataset", list(datasets) if len(datasets) > 1 else next(iter(datasets)), where, Key("dataset")
            )
        yield from self._assignments()

    def _dataset(
        self, keywords: Mapping[str, object], positional: list[object], where: str, found: dict[str, str]
    ) -> Iterator[Entry]:
        path = keywords.get("path", positional[0] if positional else None)
        files = keywords.get("data_files")
        if isinstance(files, dict):
            files = files.get("train", next(iter(files.values()), None))
        if isinstance(files, list) and len(files) == 1:
            files = files[0]
        name = files if path in ("json", "parquet", "csv", "text", "arrow") else path
        if isinstance(name, Computed):
            yield Entry("load_dataset", name, where, Key("dataset"))
        elif isinstance(name, str):
            found.setdefault(name, where)
        config = keywords.get("name", positional[1] if len(positional) > 1 else None)
        for key, value, meaning in (
            ("name", config, "dataset_config"),
            ("split", keywords.get("split"), "dataset_split"),
        ):
            if value is not None:
                yield Entry(f"load_dataset {key}", value, where, Key(meaning))

    def _assignments(self) -> Iterator[Entry]:
        for node in live_nodes(self._script.tree):
            match node:
                case ast.Assign(targets=[ast.Subscript(value=ast.Attribute(attr="environ"), slice=key)], value=value):
                    name = self._script.value(key)
                    tracker = str(name).startswith(("WANDB", "MLFLOW", "COMET", "HF_"))
                    meaning = Key("tracker_project" if tracker else "cuda_env")
                    yield Entry(str(name), self._script.value(value), f"{self._source}:{node.lineno}", meaning)
                case ast.Assign(targets=[ast.Attribute(attr=attribute)], value=value) if attribute in _ATTRIBUTES:
                    target, where = ast.unparse(node.targets[0]), f"{self._source}:{node.lineno}"
                    yield Entry(target, self._script.value(value), where, _ATTRIBUTES[attribute])

    def _where(self, call: ast.Call) -> str:
        return f"{self._source}:{call.lineno}"


def _look(table: Mapping[str, Key], key: str) -> Key | None:
    if key in table:
        return table[key]
    prefixes = TRL.prefixes
    if table is TRAINER_CONFIG:
        return next((Key(name) for prefix, name in prefixes.items() if key.startswith(prefix)), None)
    return None


def _owner(call: ast.Call) -> str:
    function = call.func
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        return function.value.id
    return ""


def _is_fast(call: ast.Call, method: str) -> bool:
    owner = _owner(call)
    return callee(call) == method and owner.startswith("Fast") and owner.endswith("Model")


def _is_model(call: ast.Call) -> bool:
    owner = _owner(call)
    return (
        callee(call) == "from_pretrained"
        and owner.endswith(_MODEL_ENDS)
        and owner != "PeftModel"
        and not owner.startswith("Fast")
    )


def _imports(node: ast.AST, package: str) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.split(".")[0] == package for alias in node.names)
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == package
