"""Text to plain values: the YAML that is accepted, and everything around it that is not."""

import os
from pathlib import Path

import pytest

from msprobe_megatron.config import ConfigError, load
from msprobe_megatron.config.document import MAX_BYTES, MAX_DEPTH, parse_document_text, read_document


def parse(text):
    return parse_document_text(text, "probe.yaml")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("10", 10),
        ("-3", -3),
        ("010", 10),
        ("1e-8", 1e-8),
        ("0.5", 0.5),
        (".5", 0.5),
        ("true", True),
        ("false", False),
        ("null", None),
        ("~", None),
        ("yes", "yes"),
        ("off", "off"),
        ("True", "True"),
        ("20-22", "20-22"),
        ("1:30", "1:30"),
        ("2024-01-01", "2024-01-01"),
        ("1_000", "1_000"),
        ("0x10", "0x10"),
        ("'10'", "10"),
        ('"true"', "true"),
        ("123456789012345678901234567890", "123456789012345678901234567890"),
        ("[1, [a, {b: 2}]]", [1, ["a", {"b": 2}]]),
    ],
)
def test_scalars(text, value):
    found = parse(f"key: {text}")["key"]
    assert found == value
    assert type(found) is type(value)


def test_keys_are_words():
    assert parse("on: 1\n2: 3\nnull: 4") == {"on": 1, "2": 3, "null": 4}


@pytest.mark.parametrize("text", ["{'on': 1}", "on: 1\n", "---\non: 1\n...\n", "\ufeffon: 1", "# comment\non: 1"])
def test_forms_of_one_document(text, tmp_path):
    path = tmp_path / "a.yaml"
    path.write_text(text, encoding="utf-8")
    assert read_document(path) == {"on": 1}


def test_json_with_tabs_and_surrogates():
    assert parse('{\n\t"a": [1, 2.5, true, null, "\\ud83d\\ude00"],\n\t"b": {}\n}') == {
        "a": [1, 2.5, True, None, "\U0001f600"],
        "b": {},
    }


def test_json_that_only_yaml_reads():
    assert parse('{"a": 1, b: [2,],}') == {"a": 1, "b": [2]}


def test_empty():
    assert parse("") is None
    assert parse("# nothing\n") is None


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("dump:\n  level: L0\n  level: L1\n", ["dump.level", "twice", "line 3"]),
        ('{"dump": {"level": "L0", "level": "L1"}}', ["dump.level", "twice"]),
        ('{"a": [{"b": 1, "b": 1}]}', ["a[0].b", "twice"]),
        ("a: &x 1", ["line 1", "anchor"]),
        ("a: 1\nb: *a", ["line 2", "alias"]),
        ("a: &x [*x]", ["anchor"]),
        ("a: !!str 1", ["line 1", "tag"]),
        ("a: !!python/object/apply:os.system [ls]", ["tag", "os.system"]),
        ("a: !mine 1", ["tag", "!mine"]),
        ("<<: {a: 1}", ["merge key"]),
        ("? [a, b]\n: 1", ["key", "not plain text"]),
        ("a: 1\n---\nb: 2", ["line 2"]),
        ("a: [1, 2", ["line 1", "YAML or JSON"]),
        ("a:\n\t- 1", ["line 2", "YAML or JSON"]),
        ("a: \x00", ["YAML or JSON"]),
        ("a: \x07", ["YAML or JSON"]),
        ('a: "\\UFFFFFFFF"', ["YAML or JSON"]),
        ('{"a": [1，"b": 2}', ["full-width", "，"]),
        ("[" * 5000, ["too deeply", str(MAX_DEPTH)]),
        ('{"a":' * 5000, ["too deeply", str(MAX_DEPTH)]),
        ('{"a":' * 40 + "1" + "}" * 40, ["too deeply", str(MAX_DEPTH)]),
    ],
)
def test_refused(text, parts):
    with pytest.raises(ConfigError) as caught:
        parse(text)
    message = str(caught.value)
    assert message.startswith("probe.yaml: ")
    assert len(message.splitlines()) == 1
    for part in parts:
        assert part in message
    assert "accepted: " in message


def test_depth_that_is_just_accepted():
    deep = parse("a: " + "[" * (MAX_DEPTH - 2) + "1" + "]" * (MAX_DEPTH - 2))["a"]
    for _ in range(MAX_DEPTH - 2):
        (deep,) = deep
    assert deep == 1


def test_size_limit(tmp_path):
    path = tmp_path / "big.yaml"
    path.write_bytes(b"#" * (MAX_BYTES - 1) + b"\n")
    assert read_document(path) is None
    path.write_bytes(b"#" * (MAX_BYTES + 1))
    with pytest.raises(ConfigError, match=f"too large.*{MAX_BYTES}"):
        read_document(path)


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="missing.yaml: cannot be read .No such file"):
        load(tmp_path / "missing.yaml")
    with pytest.raises(ConfigError, match="is not a regular file"):
        load(tmp_path)
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="is not a regular file"):
        load(tmp_path / "pipe")
    with pytest.raises(ConfigError, match="not a file name"):
        load("a\0b")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe9\xe9")
    with pytest.raises(ConfigError, match="byte 3 is not UTF-8"):
        load(tmp_path / "latin.yaml")


def test_name_with_a_newline_stays_on_one_line(tmp_path):
    path = Path(tmp_path) / "two\nlines.yaml"
    path.write_text("nonsense: 1")
    with pytest.raises(ConfigError) as caught:
        load(path)
    assert len(str(caught.value).splitlines()) == 1
    assert "two\\nlines.yaml" in str(caught.value)
