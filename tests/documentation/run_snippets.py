"""Runs the documentation's Python blocks for a framework on this rank: `run_snippets.py FRAMEWORK FOLDER [PAGE ...]`.

Those of a page run in order, in one namespace, in a folder of the page's own.
"""

from __future__ import annotations

import linecache
import os
import sys
from importlib import import_module
from pathlib import Path

from pages import AFTER, BEFORE, REPLACED, SEPARATE, TENSORFLOW, TORCH, snippets

framework, folder, *only = sys.argv[1:]
hvd = import_module(f"horovod_sparse.{framework}")
hvd.init()


def run(what: str, text: str, line: int, namespace: dict[str, object]) -> None:
    """Lines are counted as on the page; AutoGraph looks for the source in the cache."""
    source = "\n" * (line - 1) + text
    linecache.cache[what] = len(source), None, source.splitlines(keepends=True), what
    exec(compile(source, what, "exec"), namespace)


for page, of_page in snippets(framework).items():
    if only and page not in only:
        continue
    place = Path(folder, Path(page).stem)
    place.mkdir(exist_ok=True)
    os.chdir(place)
    key = page, framework
    before = (TORCH if framework == "torch" else TENSORFLOW) + BEFORE.get(key, "")
    for part in [[block] for block in of_page] if key in SEPARATE else [of_page]:
        namespace: dict[str, object] = {"__name__": "snippets"}
        run(f"before {page}", before, 1, namespace)
        for block in part:
            text = block.text
            for shown, meant in REPLACED.items() if page == "README.md" else ():
                text = text.replace(shown, meant)
            run(f"{page}:{block.line}", text, block.line, namespace)
            hvd.allreduce(import_module(framework).zeros([1]), name="together")  # what one rank has written is there
        run(f"after {page}", AFTER.get(key, ""), 1, namespace)
    if framework == "tensorflow":
        import tensorflow as tf

        tf.keras.mixed_precision.set_global_policy("float32")
    if hvd.rank() == 0:
        print(f"{page}: {len(of_page)} blocks ran", flush=True)
