"""docs/laws.md has every law as the registry has it; `python -m tests.unit.analysis.laws.test_document` writes it."""

from pathlib import Path

from msprobe_megatron.analysis.laws.registry import LAWS

DOCUMENT = Path(__file__).parents[4] / "docs" / "laws.md"
BEGIN, END = "<!-- laws: generated -->", "<!-- end of laws -->"


def table() -> str:
    """The laws as Markdown."""
    lines = ["| law | what holds | faults that break it | recorded by | cost |", "|---|---|---|---|---|"]
    lines += [f"| `{law.name}` | {law.says} | {law.finds} | `{law.needs}` | {law.cost} |" for law in LAWS]
    return "\n".join(lines)


def section(text: str) -> str:
    return text[text.index(BEGIN) + len(BEGIN) : text.index(END)].strip()


def test_the_document_has_every_law():
    assert section(DOCUMENT.read_text(encoding="utf-8")) == table()


def test_names_are_unique_and_every_law_says_what_to_do():
    assert len({law.name for law in LAWS}) == len(LAWS)
    assert all(law.next and law.needs and law.cost for law in LAWS)


if __name__ == "__main__":
    head, rest = DOCUMENT.read_text(encoding="utf-8").split(BEGIN)
    DOCUMENT.write_text(f"{head}{BEGIN}\n{table()}\n{END}{rest.split(END)[1]}", encoding="utf-8")
