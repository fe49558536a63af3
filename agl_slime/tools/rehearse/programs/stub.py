"""A program that stands for each harmful or absent command of a launch script: it records its arguments, and answers as
on the machines of the run. Uses the standard library only, as it starts once per command.

    stub.py NAME ARGUMENTS...        beside ``settings.json`` (``gpus``, ``nodes``, ``python``, ``sandbox``) and ``log``
"""

import json
import os
import re
import shutil
import subprocess
import sys

HERE = os.path.dirname(os.path.abspath(__file__))
CARD, MEMORY, ADDRESS = "NVIDIA H100 80GB HBM3", "81559 MiB", "10.77.0.{}"
FILES = ("rm", "rmdir", "mv", "cp", "ln", "mkdir", "touch", "chmod", "tee")  # which a sandbox lets happen
READS = ("rev-parse", "describe", "log", "config", "branch", "status", "diff", "ls-files")  # of git


def main(name: str, arguments: list[str]) -> int:
    with open(f"{HERE}/settings.json") as file:
        settings = json.load(file)
    line = next((word for word in arguments if not word.startswith("-")), "")
    stdin = ""
    if name == "ssh" and not {"-n", "-f"} & {*arguments}:  # it reads its standard input, as the real one does
        stdin = sys.stdin.buffer.read(2**16).decode(errors="replace")
    record(name, arguments, stdin)
    gpus, nodes = settings["gpus"], settings["nodes"]
    if name.startswith("python") and computes(arguments):
        return subprocess.run([settings["python"], *arguments]).returncode
    if settings["sandbox"] and (name in FILES or (name == "git" and line in READS)):
        code = real(name, arguments)
        return code if name == "git" else 0
    if name == "tail":  # it follows no file
        return 0 if re.search("(^| )(-[0-9a-z]*[fF]|--follow|--retry)", " ".join(arguments)) else real(name, arguments)
    if (name in ("sudo", "numactl", "srun") or line in ("run", "exec")) and (words := command_of(arguments)):
        ranks = re.search(r"(?:^| )(?:--ntasks[= ]|-n ?|--nodes[= ]|-N ?)(\d+)", " ".join(arguments[: -len(words)]))
        last = min(int(ranks[1]) if ranks else nodes, nodes) if name == "srun" else 1
        codes = [run(words, SLURM_PROCID=n, SLURM_NODEID=n, SLURMD_NODENAME=f"node{n}") for n in range(last)]
        return max(codes, default=0)
    if name == "ray" and arguments[:2] == ["job", "submit"]:
        print("Job 'raysubmit_rehearsal' submitted successfully")
        words = arguments[arguments.index("--") + 1 :] if "--" in arguments else []
        if os.path.basename((words or [""])[0]) in ("bash", "sh"):
            return run(words)
    answer(name, arguments, line, gpus, nodes)
    return 0


def record(name: str, arguments: list[str], stdin: str) -> None:
    env = {text(key): text(value) for key, value in os.environ.items()}
    words = {"argv": [text(word) for word in (name, *arguments)], "cwd": text(os.getcwd())}
    files = [word for word in words["argv"][1:] if os.path.exists(word)]
    row = json.dumps({**words, "set": env.pop("REHEARSE_SET", "").split(), "stdin": stdin, "files": files, "env": env})
    with open(f"{HERE}/log", "a") as log:
        log.write(row + "\n")


def text(word: str) -> str:
    """A word of the system, whose bytes may be no UTF-8."""
    return os.fsencode(word).decode(errors="replace")


def computes(arguments: list[str]) -> bool:
    """Whether Python's code is in its arguments or its standard input, and not in a file."""
    rest = [word for word in arguments if not re.fullmatch("-[uBEIOSs]+", word)]
    return not rest or rest[0] in ("-c", "-", "-V", "--version")


def command_of(arguments: list[str]) -> list[str]:
    """The command in a wrapper's arguments."""
    for index, word in enumerate(arguments):
        if not word.startswith("-") and not word.isdigit() and word not in ("run", "exec") and shutil.which(word):
            return arguments[index:]
    return []


def run(words: list[str], **variables: object) -> int:
    env = {**os.environ, **{name: str(value) for name, value in variables.items()}}
    env["PATH"] = f"{HERE}/stubs{os.pathsep}{env.get('PATH', '')}"
    return subprocess.run(words, env=env).returncode


def real(name: str, arguments: list[str]) -> int:
    path = os.pathsep.join(part for part in os.environ.get("PATH", "").split(os.pathsep) if part != f"{HERE}/stubs")
    program = shutil.which(name, path=path)
    return subprocess.run([program, *arguments], stderr=subprocess.DEVNULL).returncode if program else 0


def answer(name: str, arguments: list[str], line: str, gpus: int, nodes: int) -> None:
    """The output of a command where it is part of what scripts read: of a node with all GPUs, and of a cluster on which
    all nodes have joined."""
    rank = int(os.environ.get("SLURM_PROCID") or 0)
    words = " ".join(arguments)
    if name == "nvidia-smi":
        template = "GPU {n}: " + CARD + (" (UUID: GPU-{n})" if "-L" in arguments else "")
        if "--query-gpu" in words:
            template = MEMORY if "memory" in words else "{n}" if "index" in words else CARD
        elif line == "topo":
            template = "GPU{n} " + " ".join(["NV18"] * (gpus - 1))
        print("\n".join(template.format(n=n) for n in range(gpus)))
    elif name == "hostname":
        print(ADDRESS.format(rank + 1) if re.search("-[iI]|--ip|--all-ip", words) else f"node{rank}")
    elif name.startswith("pip") and line in ("list", "freeze", "show"):  # of slime's image
        print("megatron-core 0.16.0 /root/Megatron-LM\nsglang 0.5.9\nray 2.55.1\ntorch 2.9.1")
    elif name == "scontrol":
        print("\n".join(f"node{n}" for n in range(nodes)))
    elif name == "ray" and line == "status":
        total = gpus * nodes
        print("======== Autoscaler status ========\nNode status\nActive:")
        print("\n".join(f" 1 node_{n}" for n in range(nodes)))
        print("Pending:\n (no pending nodes)\nRecent failures:\n (no failures)\n\nResources")
        print(f"Total Usage:\n 0.0/{total}.0 GPU\n {total} GPU")  # scripts look for either form
    elif name == "ray" and arguments[:2] == ["job", "status"]:
        print("Status for job 'raysubmit_rehearsal': SUCCEEDED\nJob 'raysubmit_rehearsal' succeeded")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], sys.argv[2:]))
