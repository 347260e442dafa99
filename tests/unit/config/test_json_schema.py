"""The JSON Schema accepts every probe file of the documentation and the scripts, and refuses planted faults."""

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

from msprobe_megatron.config import ProbeConfig, from_document
from msprobe_megatron.config.document import parse_document_text
from msprobe_megatron.config.json_schema import json_schema
from msprobe_megatron.config.keys import keys_of
from msprobe_megatron.config.reference import sections

ROOT = Path(__file__).parents[3]
SCHEMA = json_schema()
TYPES = {
    "object": lambda value: isinstance(value, dict),
    "array": lambda value: isinstance(value, list),
    "string": lambda value: isinstance(value, str),
    "boolean": lambda value: isinstance(value, bool),
    "integer": lambda value: isinstance(value, int) and not isinstance(value, bool),
    "number": lambda value: isinstance(value, int | float) and not isinstance(value, bool),
    "null": lambda value: value is None,
}
SAYS_NOTHING = {"$schema", "title", "description", "default"}
KEYWORDS = {
    "type": lambda kind, value, schema: TYPES[kind](value),
    "enum": lambda words, value, schema: any(type(word) is type(value) and word == value for word in words),
    "const": lambda word, value, schema: word == value,
    "anyOf": lambda schemas, value, schema: any(accepts(one, value) for one in schemas),
    "minimum": lambda low, value, schema: value >= low,
    "maximum": lambda high, value, schema: value <= high,
    "exclusiveMinimum": lambda low, value, schema: value > low,
    "minLength": lambda low, value, schema: len(value) >= low,
    "pattern": lambda pattern, value, schema: re.search(pattern, value) is not None,
    "items": lambda items, value, schema: all(accepts(items, item) for item in value),
    "minItems": lambda low, value, schema: len(value) >= low,
    "maxItems": lambda high, value, schema: len(value) <= high,
    "minProperties": lambda low, value, schema: len(value) >= low,
    "required": lambda names, value, schema: set(names) <= set(value),
    "properties": lambda keys, value, schema: all(accepts(keys[key], value[key]) for key in value if key in keys),
    "additionalProperties": lambda other, value, schema: all(
        other is not False and accepts(other, value[key]) for key in value if key not in schema.get("properties", {})
    ),
}


def accepts(schema, value):
    """A validator of the keywords that the schema uses; a keyword it does not know is an error."""
    if "type" in schema and not TYPES[schema["type"]](value):
        return False
    return all(KEYWORDS[key](schema[key], value, schema) for key in schema if key not in SAYS_NOTHING)


def probe_files():
    pages = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
    for page in pages:
        for number, text in enumerate(re.findall(r"```yaml\n(.*?)```", page.read_text(encoding="utf-8"), re.S)):
            yield pytest.param(text, id=f"{page.name}-{number}")
    for path in (ROOT / "scripts" / "quickstart_probe.yaml", ROOT / "tests" / "jobs" / "trust" / "everything.yaml"):
        yield pytest.param(path.read_text(encoding="utf-8"), id=path.name)


@pytest.mark.parametrize("text", list(probe_files()))
def test_documented_probe_files_are_accepted(text):
    document = parse_document_text(text, "probe.yaml")
    from_document(document, "probe.yaml")
    assert accepts(SCHEMA, document)
    if importlib.util.find_spec("jsonschema") is not None:
        import jsonschema

        jsonschema.Draft202012Validator.check_schema(SCHEMA)
        jsonschema.Draft202012Validator(SCHEMA).validate(document)


@pytest.mark.parametrize(("path", "section"), [("top", ProbeConfig), *sections(ProbeConfig)])
def test_every_example_is_accepted(path, section):
    for name, declared in keys_of(section).items():
        assert accepts(declared.type.schema, yaml.safe_load(f"value: {declared.example}")["value"]), name


@pytest.mark.parametrize(("path", "section"), [("top", ProbeConfig), *sections(ProbeConfig)])
def test_every_default_is_accepted(path, section):
    for name, declared in keys_of(section).items():
        # An empty text and a count of 0 stand for a key left out, where the reader takes neither.
        if not declared.required and declared.default and declared.type.section is None:
            assert accepts(declared.type.schema, declared.type.write(declared.default)), name


@pytest.mark.parametrize(
    "text",
    [
        "steps: [1]",
        "dump:",
        "dump: {lvl: L0}",
        "dump: {level: L2}",
        "dump: {sketch: 4097}",
        "dump: {sketch: true}",
        "dump: {list: mlp}",
        "dump: {data_mode: []}",
        "dump: {scope: [a, b, c]}",
        "dump: {functions: [relu]}",
        "dump: {layers: [x]}",
        "dump: {}\nranks: {px: 0}",
        "dump: {}\nsteps: []",
        "monitor: {every: 0}",
        "monitor: {targets: {a: {input: tuple}}}",
        "monitor: {alerts: [nan]}",
        "monitor: {alerts: [{threshold: 1}]}",
        "monitor: {alerts: [{rule: spike, threshold: 0}]}",
        "perturb: {budget: 0.05}",
        "perturb: {rows: 0}",
        "recorder: {on: [crash]}",
        "dump: {}\nshards: [{name: a}]",
        "dump: {}\nreplay: {run: x}",
        "dump: {}\nreproduce: {seed: -1}",
        "dump: {}\nstrict: 1",
    ],
)
def test_faults_are_refused(text):
    assert not accepts(SCHEMA, parse_document_text(text, "probe.yaml"))


def test_types_ranges_words_and_defaults_are_those_of_the_keys():
    dump = SCHEMA["properties"]["dump"]["properties"]
    assert dump["level"]["enum"] == ["L0", "L1", "mix", "debug"] and dump["level"]["default"] == "L0"
    assert (dump["sketch"]["minimum"], dump["sketch"]["maximum"], dump["sketch"]["default"]) == (0, 4096, 0)
    assert SCHEMA["properties"]["limits"]["properties"]["host_memory"]["default"] == "2GiB"
    assert SCHEMA["properties"]["output"]["default"] == "./probe_out"
    assert json.loads(json.dumps(SCHEMA)) == SCHEMA


def below(schema, path):
    """The schema of a section by its path in the reference: ``monitor.alerts[…]``, ``monitor.targets.NAME``."""
    for part in [part for part in re.split(r"\.|(?=\[…\])", path) if part]:
        if part == "[…]":
            schema = schema["items"]
        elif "properties" in schema and part in schema["properties"]:
            schema = schema["properties"][part]
        else:
            schema = schema["additionalProperties"]
        if "properties" not in schema and "anyOf" in schema:
            schema = next(one for one in schema["anyOf"] if one.get("type") in ("object", "array"))
    return schema


def test_the_schema_and_the_page_of_keys_say_the_same():
    """Every table of docs/probe_file.md: the same keys, in the same order, with the same meanings and defaults."""
    page = (ROOT / "docs" / "probe_file.md").read_text(encoding="utf-8")
    parts = re.split(r"^## ", page, flags=re.M)[1:]
    assert len(parts) >= 10
    for part in parts:
        title = part.splitlines()[0].strip("`")
        schema = SCHEMA if title == "Top level" else below(SCHEMA, title)
        rows = [re.split(r"(?<!\\) \| ", line.strip("| ")) for line in part.splitlines() if line.startswith("| `")]
        assert [row[0].strip("`") for row in rows] == list(schema["properties"]), title
        for name, default, _, meaning, _ in rows:
            entry = schema["properties"][name.strip("`")]
            assert entry["description"] == meaning.replace("\\|", "|"), (title, name)
            assert (default == "(required)") == (name.strip("`") in schema.get("required", ())), (title, name)
            if default.startswith("`"):
                # By the kit's own reader: `off` is text in YAML 1.2.
                written = parse_document_text(f"value: {default.strip('`')}", "page")["value"]
                assert entry["default"] == written, (title, name)
