"""A program that stands for each harmful or absent command of a launch script: it records its arguments and does
nothing. Uses the standard library only, as it starts once per command.

    stub.py NAME ARGUMENTS...        with REHEARSE_LOG, REHEARSE_GPUS and REHEARSE_PYTHON in the environment
"""

import json
import os
import shutil
import subprocess
import sys

WRAPPERS = ("sudo", "numactl", "nohup", "exec")
CARD, MEMORY = "NVIDIA H100 80GB HBM3", "81559 MiB"


def main(name: str, arguments: list[str]) -> int:
    with open(os.environ["REHEARSE_LOG"], "a") as log:
        log.write(json.dumps({"argv": [name, *arguments], "cwd": os.getcwd(), "env": dict(os.environ)}) + "\n")
    if name.startswith("python") and arguments[:1] in (["-c"], ["-"]):  # a computation of the script
        return subprocess.run([os.environ["REHEARSE_PYTHON"], *arguments]).returncode
    if name in WRAPPERS:
        words = [word for word in arguments if not word.startswith("-")]
        return subprocess.run(words).returncode if words and shutil.which(words[0]) else 0
    gpus = int(os.environ["REHEARSE_GPUS"])
    if name == "nvidia-smi":
        if "-L" in arguments:
            print("\n".join(f"GPU {n}: {CARD} (UUID: GPU-{n})" for n in range(gpus)))
        elif any(one.startswith("--query-gpu") for one in arguments):
            print("\n".join([MEMORY if "memory" in " ".join(arguments) else CARD] * gpus))
        elif "topo" in arguments:
            print("\n".join(f"GPU{n} " + " ".join(["NV18"] * (gpus - 1)) for n in range(gpus)))
    if name == "ray" and arguments[:2] == ["job", "submit"]:
        print("Job 'raysubmit_rehearsal' submitted successfully")
    if name == "tee":
        shutil.copyfileobj(sys.stdin, sys.stdout)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
