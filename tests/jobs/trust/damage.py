"""Ways to damage a file, and how many damaged ones were tried: what all tests of untrusted input share."""

import os

CASES = int(os.environ.get("MSPROBE_FUZZ_CASES", "60"))
_NONSENSE = [b"{}", b"[]", b"null", b'{"a": ', b"\x00\x01\x02", b'{"sizes": 3}', b'{"ranks": 7}']


def damage(path, source):
    """Change, cut, empty or lengthen a file, or replace it by nonsense; `source` is a random.Random."""
    data = bytearray(path.read_bytes())
    how = source.choice(["flip", "cut", "empty", "append", "text", "huge_number", "swap"])
    if how == "flip" and data:
        for _ in range(source.randint(1, 30)):
            data[source.randrange(len(data))] ^= 1 << source.randrange(8)
    elif how == "cut":
        data = data[: source.randrange(len(data) + 1)]
    elif how == "empty":
        data = bytearray()
    elif how == "append":
        data += source.randbytes(200)
    elif how == "text":
        data = bytearray(source.choice(_NONSENSE))
    elif how == "huge_number":
        data = bytearray(data.replace(b"1", b"1" * 40))
    else:
        source.shuffle(data)
    path.write_bytes(bytes(data))


def tried(count):
    """Tell `scripts/fuzz.sh` how many inputs a test has tried."""
    print(f"inputs tried: {count}")
