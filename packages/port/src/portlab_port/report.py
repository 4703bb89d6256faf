"""The report of a port: Markdown for people, JSON for machines."""

from collections import Counter
from typing import Any

from portlab_port.build import Note, Ported
from portlab_port.rules import FATES, GROUPS, Fate
from portlab_port.settings import GpuRecipe

_TITLES: dict[Fate, str] = {
    "cannot": "Cannot be said",
    "changes": "Changes on TPU",
    "carries": "Carries over",
    "drops": "Has no place here",
}


def counts(ported: Ported) -> str:
    """One line: how many settings had which fate."""
    number = Counter(note.fate for note in ported.notes)
    parts = (
        f"{number['carries']} carry over, {number['changes']} change, {number['cannot']} cannot be said, "
        f"{number['drops']} have no place here"
    )
    return f"{parts}, {len(ported.unknown)} not understood"


def markdown(ported: Ported, gpu: GpuRecipe) -> str:
    """The report as Markdown."""
    lines = [f"# {gpu.source} ({gpu.style}) as a Portlab recipe", "", f"{counts(ported)}.", ""]
    lines += [f"- {text}" for text in ported.sums]
    if ported.unknown:
        lines += ["", "## Not understood", "", "| key | value | where |", "|---|---|---|"]
        lines += [f"| `{_cell(u.key)}` | {_cell(u.text)} | {_cell(u.where)} |" for u in ported.unknown]
    for fate, title in _TITLES.items():
        notes = [note for note in ported.notes if note.fate == fate]
        if notes:
            lines += ["", f"## {title}", "", "| setting | there | here | why |", "|---|---|---|---|"]
            lines += [_row(note) for note in notes]
    return "\n".join(lines) + "\n"


def as_json(ported: Ported, gpu: GpuRecipe) -> dict[str, Any]:
    """The report as a JSON value."""
    return {
        "source": gpu.source,
        "style": gpu.style,
        "counts": {fate: sum(note.fate == fate for note in ported.notes) for fate in FATES}
        | {"not understood": len(ported.unknown)},
        "sums": list(ported.sums),
        "notes": [
            {
                "key": note.setting.key,
                "value": note.setting.text,
                "where": note.setting.where,
                "default_of": note.setting.default_of or None,
                "fate": note.fate,
                "becomes": note.became,
                "why": note.why,
                "docs": f"docs/{note.docs}",
            }
            for note in ported.notes
        ],
        "unknown": [{"key": u.key, "value": u.text, "where": u.where} for u in ported.unknown],
        "recipe": ported.recipe.model_dump(mode="json", include=None),
    }


def _row(note: Note) -> str:
    setting = note.setting
    there = f"{setting.text} (default of {setting.default_of})" if setting.default_of else setting.text
    link = f"{note.why} (docs/{note.docs})" if note.fate in ("changes", "cannot") else note.why
    return f"| `{_cell(setting.key)}` | {_cell(there)} | {_cell(note.became)} | {_cell(link)} |"


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def rules_table() -> str:
    """The rules as Markdown, for the manual: a table for each group, settings with one reason in one row."""
    lines: list[str] = []
    for title, rules in GROUPS.items():
        rows: dict[tuple[str, str, str], list[str]] = {}
        for rule in rules:
            rows.setdefault(("error" if rule.loss else rule.fate, rule.to, rule.why), []).append(rule.name)
        lines += ["", f"### {title}", "", "| setting | fate | recipe | why |", "|---|---|---|---|"]
        for (word, to, why), names in rows.items():
            keys = ", ".join(f"`{key.strip()}`" for key in to.split(",")) if to else ""
            lines.append(f"| {', '.join(f'`{name}`' for name in names)} | {word} | {keys} | {_cell(why)} |")
    return "\n".join(lines[1:]) + "\n"
