#!/usr/bin/env python3
"""A stand-in for llama.cpp's benchmark programs, which prints results in their format, with times known to the tests.
Every run appends its name and flags to the file FAKE_LOG. If FAKE_ANSWER is set, the run crashes or prints that
text."""

import json
import os
import sys
from pathlib import Path

flags = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=True))
log = Path(os.environ["FAKE_LOG"])
with log.open("a") as out:
    out.write(json.dumps([Path(sys.argv[0]).name, flags]) + "\n")
if os.environ.get("FAKE_ANSWER") == "crash":
    sys.exit("noise\nllama_model_load: it does not fit")
if os.environ.get("FAKE_ANSWER"):
    print(os.environ["FAKE_ANSWER"])
    sys.exit(0)
slow = 1.0 if flags["-fa"] == "1" else 0.5  # seconds without flash attention
slow += {"512": 0.0, "128": -0.25, "2048": 1.0}[flags["-ub"]]
slow += 1.0 if flags["-t"] == "1" else 0.0
if Path(sys.argv[0]).name == "llama-bench":
    seconds = 1.0 + slow
    tokens = int(flags["-p"]) or int(flags["-n"])
    figures = {"build_commit": "abc", "build_number": 1, "model_type": "llama", "samples_ts": [tokens / seconds]}
    print(json.dumps([figures]))
else:
    print("| a table |")
    for share in (10, 1):  # the first result is of a warm-up run
        print(json.dumps({"pl": 2, "t_pp": share * slow, "t_tg": share * 1.0}))
