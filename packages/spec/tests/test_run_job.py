"""The main job with a trainer that only notes what it is asked: stages, what is kept of them, who writes."""

import json

import pytest
from char_tokenizer import CharTokenizer

from portlab_spec.assets import ModelFolder
from portlab_spec.errors import CheckFailed, UserError
from portlab_spec.formats import find_format
from portlab_spec.packing import Packing, plan
from portlab_spec.recipe import Recipe
from portlab_spec.run import job
from portlab_spec.run.display import show
from portlab_spec.run.job import Backend, Trained, run_job
from portlab_spec.run.train_log import TrainLog

FMT = find_format("functiongemma")
SPLITS = {"train": 4, "validation": 2, "test": 3}
LOSSES = {"before": 2.0, "after": 0.5}


class FakeSession:
    """Says "b" until it is trained and "a" afterwards: no call either way, which is what the data set asks for."""

    def __init__(self, tokenizer):
        self._tokenizer, self._state, self.calls = tokenizer, "before", []

    def introduce(self):
        return ["a model of air", "on a table"]

    def device(self):
        return {"platform": "table", "kind": "oak", "count": 1}

    def disk_needed(self):
        return 1000

    def generate(self, prompts, stop_ids, advance):
        self.calls.append(f"generate {len(prompts)}")
        text = "a" if self._state == "after" else "b"
        return [[*self._tokenizer.encode(text), stop_ids[0]] for _ in prompts]

    def loss(self, rows):
        self.calls.append(f"loss {len(rows)}")
        return LOSSES[self._state]

    def train(self, rows, order, folder, say):
        self.calls.append(f"train {len(rows.train)}")
        self._state = "after"
        (folder / "checkpoints").mkdir(exist_ok=True)
        return Trained(
            step=len(order),
            log=TrainLog([2.0, 1.0, 0.5], 7.5, [(3, 0.7)]),
            fresh_steps=len(order),
            fresh_seconds=2.0,
            plan=plan(order, Packing(window=None)),
            supervised_tokens=12,
            rates={"examples_per_second": 6.0},
            device={"graphs": 3},
        )

    def export(self, rows, after, folder, say):
        self.calls.append(f"export at {after.loss}")
        say("exported")
        return {"merged": str(folder / "merged")}


class Lab:
    """Runs jobs in one folder; each has a session of its own."""

    def __init__(self, data, out, tokenizer):
        self.out, self.tokenizer, self.said = out, tokenizer, []
        self.recipe = Recipe(name="air", data=data, steps=3, batch_size=2, lora={"train_control_rows": False})

    def run(self, *, leads=True, session=None, **changes):
        self.session = session or FakeSession(self.tokenizer)
        backend = Backend("torchax", "train-torchax", ("numpy",), lambda *_: self.session, leads=leads)
        return run_job(self.recipe.model_copy(update=changes), self.out, backend, self.said.append)

    def read(self, name):
        return json.loads((self.out / name).read_text())


@pytest.fixture
def lab(tmp_path, monkeypatch):
    tokenizer = CharTokenizer(sorted({*FMT.control_tokens, *FMT.stop_tokens, "<bos>"}))
    lines = [
        {
            "id": f"{split}-{i}",
            "split": split,
            "messages": [{"role": "user", "content": f"{split} {i}?"}, {"role": "assistant", "content": "a"}],
        }
        for split, count in SPLITS.items()
        for i in range(count)
    ]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    model = ModelFolder(tmp_path / "model", "air", None)
    monkeypatch.setattr(job, "resolve_model", lambda *_: model)
    monkeypatch.setattr(job.Tokenizer, "load", lambda _: tokenizer)
    monkeypatch.setattr(job, "require_merge_ckpt", lambda: None)
    monkeypatch.setattr(job.charts, "loss_curve", lambda path, losses, title: path.write_text(f"{title} {losses}"))
    return Lab(str(tmp_path / "data.jsonl"), tmp_path / "run", tokenizer)


def test_the_stages_come_in_order(lab):
    lab.run()
    assert lab.session.calls == ["generate 3", "loss 3", "train 4", "generate 3", "loss 3", "export at 0.5"]


def test_what_is_said(lab):
    lab.run()
    prepared, *rest = lab.said
    assert prepared.startswith("prepared air and 4 training rows in ")
    assert prepared.endswith(f"-> {lab.out}")
    assert [line.split(" in ")[0] for line in rest] == [
        "a model of air",
        "on a table",
        "scored before training: 3/3 exact calls",
        "trained 3 steps",
        "scored after training: 3/3 exact calls",
        "exported",
    ]


def test_the_report(lab):
    outcome = lab.run()
    report = lab.read("report.json")
    assert report == outcome.report.model_dump(mode="json")
    assert report["backend"] == "torchax"
    assert report["device"] == {"platform": "table", "kind": "oak", "count": 1, "graphs": 3}
    assert (report["loss"], report["evals"], report["exported_step"]) == ([2.0, 1.0, 0.5], [[3, 0.7]], 3)
    assert (report["before"]["loss"], report["after"]["loss"]) == (2.0, 0.5)
    assert report["rates"] == {"examples_per_second": 6.0}
    assert report["seconds"]["train"] == 7.5
    assert report["tokens"]["supervised"] == 12
    assert set(report["tokens"]) == {"supervised", "run", "run_held", "run_computed", "train_rows"}
    assert list(report["versions"]) == ["python", "numpy"]
    names = {"run": "", "checkpoints": "checkpoints", "merged": "merged"}
    names |= {"report": "report.json", "loss_curve": "loss.png"}
    assert {name: report["paths"][name] for name in names} == {k: str(lab.out / v) for k, v in names.items()}


def test_the_outcome_shows_an_answer_that_changed(lab):
    outcome = lab.run()
    assert outcome.example.split == "test"
    assert (outcome.before[0], outcome.after[0]) == ("b", "a")


def test_the_loss_and_its_exponential_are_shown(lab, capsys):
    show(lab.run())
    cells = {line.split("│")[1].strip(): line for line in capsys.readouterr().out.splitlines() if "│" in line}
    assert [cell.strip() for cell in cells["loss"].split("│")[2:4]] == ["2.0000", "0.5000"]
    assert [cell.strip() for cell in cells["perplexity"].split("│")[2:4]] == ["7.389", "1.649"]


def test_a_second_run_scores_nothing_again(lab):
    first = lab.run().report
    again = lab.run().report
    assert lab.session.calls == ["train 4", "export at 0.5"]
    assert (again.before, again.after) == (first.before, first.after)
    assert (again.seconds.before, again.seconds.after) == (first.seconds.before, first.seconds.after)
    assert [line for line in lab.said if line.endswith("(cached)")] == [
        f"{line.partition(' s, ')[0]} s (cached)"
        for line in lab.said
        if line.startswith("scored") and line.endswith("tokens/s generated")
    ]


def test_a_result_of_an_earlier_version_has_no_loss_and_is_read(lab, capsys):
    lab.run()
    old = lab.read("before.json")
    del old["evaluation"]["loss"]
    (lab.out / "before.json").write_text(json.dumps(old))
    outcome = lab.run()
    assert (outcome.report.before.loss, outcome.report.after.loss) == (None, 0.5)
    show(outcome)
    assert "perplexity" not in capsys.readouterr().out


def test_a_run_that_fails_in_its_export_keeps_what_it_scored(lab):
    class Failing(FakeSession):
        def export(self, *_):
            raise CheckFailed("it does not verify")

    with pytest.raises(CheckFailed):
        lab.run(session=Failing(lab.tokenizer))
    assert sorted(path.name for path in lab.out.iterdir()) == [
        *("after.json", "backend.json", "before.json", "checkpoints", "loss.png", "recipe.json")
    ]


def test_a_model_that_is_refused_leaves_no_folder(lab, monkeypatch):
    def refuse(*_):
        raise UserError("this model does not fit")

    with pytest.raises(UserError, match="does not fit"):
        run_job(lab.recipe, lab.out, Backend("torchax", "train-torchax", (), refuse), lab.said.append)
    assert not lab.out.exists()


def test_a_disk_too_small_is_refused_before_anything_is_written(lab):
    class Large(FakeSession):
        def disk_needed(self):
            return 1 << 62

    with pytest.raises(UserError, match="GB free"):
        lab.run(session=Large(lab.tokenizer))
    assert not lab.out.exists()


def test_merge_ckpt_is_asked_for_where_there_is_something_to_merge(lab, monkeypatch):
    def refuse():
        raise UserError("merge-ckpt is not installed")

    monkeypatch.setattr(job, "require_merge_ckpt", refuse)
    with pytest.raises(UserError, match="merge-ckpt"):
        lab.run()
    lab.run(method="full")


def test_a_process_that_does_not_lead_computes_and_is_silent(lab):
    lab.out.mkdir()
    lab.run(leads=False)
    assert lab.session.calls == ["generate 3", "loss 3", "train 4", "generate 3", "loss 3"]
    assert lab.said == []
    written = {path.name for path in lab.out.iterdir()}
    assert not written & {"recipe.json", "backend.json", "report.json", "loss.png"}
