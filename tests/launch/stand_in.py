#!/usr/bin/env python3
"""Takes the place of Python with the trainer where only the launcher is under test: starts at once, needs no torch.

`--act WORD` behind `--` says how it behaves. Every rank writes its environment to `<run>/env.<rank>`.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path


def main() -> None:
    signal.alarm(200)  # never outlives a test that failed
    words = sys.argv[1:]
    if words[0].endswith("fit_latency.py"):
        print("measured with", *words[3:], flush=True)
        if "slow" in words[words.index("--") :]:
            # As long as nobody ends it, once for each word: later lives find the file that tells.
            marks = Path(words[words.index("--output") + 1]).parent / "slow_lives"
            marks.mkdir(exist_ok=True)
            if len(list(marks.iterdir())) < words.count("slow"):
                if os.environ["RANK"] == "0":
                    (marks / os.environ["RUN_LIFE"]).touch()
                time.sleep(150)
        if os.environ["RANK"] == "0":
            with open(words[words.index("--output") + 1], "a") as stream:
                stream.write(f"measured by {os.environ['WORLD_SIZE']}\n")
        return
    if "--dry-run" in words:
        print("checked:", *words[2:])
        return
    given = dict(zip(words[2::2], words[3::2], strict=False))
    run = Path(given["--run.root"]) / given["--run.name"]
    rank, act = int(os.environ["RANK"]), given.get("--act", "train")
    (run / f"env.{rank}").write_text(json.dumps(dict(os.environ) | {"argv": " ".join(words)}))
    if act == "fail" and rank == 1:
        print("ValueError: rank 1 cannot go on", flush=True)
        raise SystemExit(3)
    saved = sorted((run / "checkpoints").glob("step_*")) if (run / "checkpoints").is_dir() else []
    step = int(saved[-1].name[5:]) if saved else 0
    print(f"start at step {step}", flush=True)
    while step < int(given["--steps"]):
        time.sleep(0.02)
        step += 1
        if Path(given["--run.stop_file"]).exists() and act != "deaf":
            if act != "forgetful" and rank == 0:
                (run / "checkpoints" / f"step_{step:08d}").mkdir(parents=True)
            return
    if rank == 0:
        (run / "done.json").write_text("{}")
    while act.endswith("-after") and not (run / "done.json").exists():
        time.sleep(0.02)  # rank 0 may start late
    time.sleep(0.3)
    if act == "killed-after" and rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    if act == "fail-after" and rank == 1:
        raise SystemExit(3)


if __name__ == "__main__":
    main()
