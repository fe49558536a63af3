"""The first process of a sandbox: starts commands, passes sockets to the host, and enforces the sandbox's limits.

bubblewrap gets it as source, so it imports the standard library alone. As process 1 of its namespace it cannot be
killed or stopped from inside; when it ends, the kernel kills all other processes of the sandbox. They cannot reach its
control socket, which has no path, and cannot trace this process.
"""

import array
import contextlib
import ctypes
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import time

HIDDEN_LOOKS = 5
HEAD = struct.Struct("!I")


class Box:
    def __init__(self, settings):
        self.settings = settings
        self.control = socket.socket(fileno=settings["control"])
        self.commands = {}  # pid: (id, whether it is an agent's program)
        self.setup_pids = set()  # survive the agent's programs
        self.next_look, self.hidden_looks = 0.0, 0
        self.data, self.fds = b"", []

    def send(self, message, fds=()):
        body = json.dumps(message).encode()
        ancillary = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))] if fds else []
        self.control.sendmsg([HEAD.pack(len(body)) + body], ancillary)

    def serve(self):
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # the kernel never delivers it to process 1 without a handler
        signal.signal(signal.SIGCHLD, lambda *_: None)
        wakes, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        poll = select.poll()
        poll.register(self.control, select.POLLIN)
        poll.register(wakes, select.POLLIN)
        self.send({"ready": os.getpid()})
        while True:
            ready = dict(poll.poll(self.settings["watch"] * 1000))
            if wakes in ready:
                os.read(wakes, 4096)
            self.reap()
            self.watch()
            if self.control.fileno() in ready and not self.receive():
                return

    def receive(self):
        data, fds, _, _ = socket.recv_fds(self.control, 1 << 16, 16)
        if not data:
            return False
        self.data += data
        self.fds += fds
        while len(self.data) >= HEAD.size:
            (size,) = HEAD.unpack_from(self.data)
            if len(self.data) < HEAD.size + size:
                break
            message = json.loads(self.data[HEAD.size : HEAD.size + size])
            self.data = self.data[HEAD.size + size :]
            try:
                getattr(self, "do_" + message["op"])(message)
            except OSError as error:
                self.send({"id": message["id"], "error": str(error)})
        return True

    def do_spawn(self, message):
        stdio, self.fds = self.fds[:3], self.fds[3:]
        try:
            pid = os.fork()
            if pid == 0:
                self.exec(message, stdio)
        finally:
            for fd in stdio:
                os.close(fd)
        self.commands[pid] = (message["id"], message["agent"])
        self.send({"id": message["id"], "pid": pid})

    def exec(self, message, stdio):
        try:
            signal.set_wakeup_fd(-1)
            for number in (signal.SIGCHLD, signal.SIGPIPE):
                signal.signal(number, signal.SIG_DFL)
            os.setsid()
            for target, fd in enumerate(stdio):
                os.dup2(fd, target)
            os.closerange(3, 1 << 16)
            for name, value in self.settings["limits"].items():
                kind = getattr(resource, "RLIMIT_" + name)
                resource.setrlimit(kind, (value, value))
            os.chdir(message["cwd"])
            name, env = message["argv"][0], message["env"]
            places = [""] if "/" in name else [f"{place}/" for place in env.get("PATH", "").split(":")]
            for place in places:  # not execvpe: it imports, and this user may not read the standard library
                if os.access(place + name, os.X_OK):
                    os.execve(place + name, message["argv"], env)
            os.write(2, f"{name}: not found\n".encode())
        except BaseException as error:
            os.write(2, f"{message['argv'][0]}: {error}\n".encode())
        finally:
            os._exit(127)

    def do_signal(self, message):
        with contextlib.suppress(ProcessLookupError):
            os.killpg(message["pid"], message["signal"])
        self.send({"id": message["id"]})

    def do_listen(self, message):
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listening:
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(("127.0.0.1", message["port"]))
            listening.listen(128)
            self.send({"id": message["id"], "fd": True}, [listening.fileno()])

    def do_connect(self, message):
        with socket.create_connection(("127.0.0.1", message["port"]), 5) as connection:
            self.send({"id": message["id"], "fd": True}, [connection.fileno()])

    def do_keep(self, message):
        self.setup_pids = {pid for pid, *_ in self.processes()}
        self.send({"id": message["id"]})

    def processes(self):
        """(pid, parent, private bytes) of all other processes."""
        for name in os.listdir("/proc"):
            if not name.isdigit() or name == "1":
                continue
            try:
                with open(f"/proc/{name}/stat") as stat, open(f"/proc/{name}/statm") as statm:
                    parent = int(stat.read().rpartition(")")[2].split()[1])
                    _, resident, shared = map(int, statm.read().split()[:3])
            except (FileNotFoundError, ProcessLookupError):
                continue
            yield int(name), parent, (resident - shared) * resource.getpagesize()

    def reap(self):
        for pid, status in ended_children():
            self.setup_pids.discard(pid)
            command_id, agent = self.commands.pop(pid, (None, False))
            if agent:
                self.clear()
            if command_id is not None:
                self.send({"id": command_id, "exit": os.waitstatus_to_exitcode(status)})

    def clear(self):
        """Kill the processes that an agent's program left behind, before its result is judged."""
        for _ in range(200):
            parents = {pid: parent for pid, parent, _ in self.processes()}
            stays = set(self.commands) | self.setup_pids
            strays = []
            for pid in parents:
                ancestor = pid
                while ancestor in parents and ancestor not in stays:
                    ancestor = parents[ancestor]
                if ancestor not in stays:
                    strays.append(pid)
            if not strays:
                return
            for number in (signal.SIGSTOP, signal.SIGKILL):  # stopped first, so that they cannot fork further
                for pid in strays:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, number)
            for _ in ended_children():
                pass
        self.end("processes", "processes that the agent left behind could not be ended")

    def watch(self):
        """Check the limits, in at most a twentieth of the time."""
        began = time.monotonic()
        if began < self.next_look:
            return
        private = sum(size for _, _, size in self.processes())
        shared = self.shared()
        if private + shared > self.settings["memory"]:
            limit = self.settings["memory"]
            self.end("memory", f"its processes had {private} private and {shared} shared bytes of memory, of {limit}")
        for path in self.settings["writable"]:
            stat = os.statvfs(path)
            if stat.f_files - stat.f_ffree > self.settings["files"]:
                self.end("files", f"{path} had more than {self.settings['files']} files")
        self.next_look = time.monotonic() + 20 * (time.monotonic() - began)

    def shared(self):
        """Bytes of shared memory: segments, memory files and shared mappings. Each counts with its full size, since
        pages stay allocated after processes have unmapped them."""
        sizes, hidden = {}, []
        for pid, *_ in self.processes():
            try:
                self.mapped(pid, sizes)
                self.memory_files(pid, sizes)
            except PermissionError:
                if self.state(pid) not in "ZX":  # zombie or dead: just ending
                    hidden.append(pid)
            except (FileNotFoundError, ProcessLookupError):
                continue
        self.hidden_looks = self.hidden_looks + 1 if hidden else 0
        if self.hidden_looks >= HIDDEN_LOOKS:  # its memory cannot be counted
            for pid in hidden:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        with open("/proc/sysvipc/shm") as lines:
            names = next(lines).split()
            segments = sum(int(line.split()[names.index("rss")]) for line in lines)
        return sum(sizes.values()) + segments

    def mapped(self, pid, sizes):
        with open(f"/proc/{pid}/maps") as lines:
            for line in lines:
                place, rights, offset, device, inode, *name = line.split(None, 5)
                if rights[3] == "s" and name and name[0].startswith(("/dev/zero", "/memfd:")):
                    begin, end = (int(part, 16) for part in place.split("-"))
                    key = device, int(inode)
                    sizes[key] = max(sizes.get(key, 0), int(offset, 16) + end - begin)

    def memory_files(self, pid, sizes):
        for name in os.listdir(f"/proc/{pid}/fd"):
            path = f"/proc/{pid}/fd/{name}"
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(path).startswith("/memfd:"):
                    stat = os.stat(path)
                    major, minor = os.major(stat.st_dev), os.minor(stat.st_dev)
                    key = f"{major:02x}:{minor:02x}", stat.st_ino
                    sizes[key] = max(sizes.get(key, 0), stat.st_blocks * 512)

    def state(self, pid):
        try:
            with open(f"/proc/{pid}/stat") as stat:
                return stat.read().rpartition(")")[2].split()[0]
        except (FileNotFoundError, ProcessLookupError):
            return "X"

    def end(self, limit, why):
        self.send({"over": limit, "why": why})
        os._exit(1)


def ended_children():
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            yield ended


def main():
    settings = json.loads(sys.argv[1])
    os.set_inheritable(settings["control"], False)
    if settings["user"] is not None:
        os.setgroups([])
        os.setresgid(*[settings["user"]] * 3)
        os.setresuid(*[settings["user"]] * 3)
    ctypes.CDLL(None).prctl(4, 0, 0, 0, 0)  # PR_SET_DUMPABLE: this process cannot be traced
    Box(settings).serve()


main()
