"""One content has one key: in every process, on every Python, for ever.

`key_vectors.json` was made by another program, from the description of the format in `keys.py` and
`fingerprint.py`. Run as a script, this file prints what this process makes of the same inputs.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import hostcache as hc

pytestmark = pytest.mark.portable

VECTORS = Path(__file__).with_name("key_vectors.json")
PARTS = ("namespaces", "prefixes", "contents", "fingerprints")


def answers() -> dict[str, list[Any]]:
    """What this process computes for each input in the vectors."""
    vectors = json.loads(VECTORS.read_text())
    spaces = [hc.Namespace(**case["fields"]) for case in vectors["namespaces"]]
    return {
        "namespaces": [space.digest.hex() for space in spaces],
        "prefixes": [
            [
                bytes(key).hex()
                for key in hc.prefix_keys(
                    case["token_ids"], case["page_tokens"], spaces[case["namespace"]]
                )
            ]
            for case in vectors["prefixes"]
        ],
        "contents": [
            hc.content_key(
                content_of(case), spaces[case["namespace"]], settings=case["settings"]
            ).hex()
            for case in vectors["contents"]
        ],
        "fingerprints": [fingerprint_of(case) for case in vectors["fingerprints"]],
    }


def committed() -> dict[str, list[Any]]:
    vectors = json.loads(VECTORS.read_text())
    answer_names = dict(zip(PARTS, ("digest", "keys", "key", "fingerprint"), strict=True))
    return {part: [case[answer_names[part]] for case in vectors[part]] for part in PARTS}


def content_of(case: dict[str, Any]) -> Any:
    if "bytes" in case:
        return bytes.fromhex(case["bytes"])
    return np.array(case["items"], dtype=case["dtype"]).reshape(case["shape"])


def fingerprint_of(case: dict[str, Any]) -> str:
    with tempfile.TemporaryDirectory() as folder:
        for name, text in case.get("files", {}).items():
            path = Path(folder, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        if "marks" in case:  # a large file of zeros, with some text here and there
            with open(Path(folder, "big.gguf"), "wb") as file:
                file.truncate(case["size_bytes"])
                for position, text in case["marks"].items():
                    file.seek(int(position))
                    file.write(text.encode())
        return hc.weights_fingerprint(folder)


def answers_of_a_process(hash_seed: str | None, start_method: str = "none") -> Any:
    environment = {name: text for name, text in os.environ.items() if name != "PYTHONHASHSEED"}
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = hash_seed
    printed = subprocess.run(
        [sys.executable, __file__, start_method],
        env=environment,
        stdout=subprocess.PIPE,
        check=True,
        timeout=100,
    ).stdout
    return json.loads(printed)


@pytest.mark.parametrize("part", PARTS)
def test_this_process_finds_the_committed_vectors(part: str) -> None:
    assert answers()[part] == committed()[part]


def test_the_vectors_have_something_to_compare() -> None:
    expected = committed()
    assert [len(expected[part]) >= 2 for part in PARTS] == [True] * len(PARTS)
    assert len(expected["prefixes"][0]) == 512 // 64


@pytest.mark.parametrize("hash_seed", [None, "0", "1", "12345"])
def test_the_hash_seed_of_a_process_does_not_count(hash_seed: str | None) -> None:
    assert answers_of_a_process(hash_seed) == committed()


@pytest.mark.parametrize("start_method", ["fork", "spawn", "forkserver"])
def test_the_way_a_process_started_does_not_count(start_method: str) -> None:
    assert answers_of_a_process(None, start_method) == committed()


def main(start_method: str) -> None:
    if start_method == "none":
        found = answers()
    else:
        with multiprocessing.get_context(start_method).Pool(1) as pool:
            found = pool.apply(answers)
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main(sys.argv[1])
