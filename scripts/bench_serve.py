"""Compare the throughput of `nmt.serve` under many clients with that of `nmt.translate` on the same lines.

python scripts/bench_serve.py run=runs/NAME                           # 20 clients for 10 seconds
python scripts/bench_serve.py run=runs/NAME seconds=60 clients=200

Each client sends one line of the test split of the run's data after the other, over one connection, and checks that
the answer is the line of `nmt.translate`. The server, the clients and `nmt.translate` run on one machine; the clients
share one process. The throughput of the server is measured while all clients are busy: from the time at which each has
had an answer until the first one stops. The time of `nmt.translate` is that of the whole command minus that of the same
command on one line, so loading does not count. Both run `rounds` times in turn. Lines per second of processor time are
those of all answers, and affected less by other programs that use the machine.

Other settings: rounds=3 lines=2000 search= (settings of the search, as search=search.beam=1), folder=runs/bench_serve.
"""

import asyncio
import json
import os
import re
import resource
import signal
import statistics
import subprocess
import sys
import time
from itertools import cycle, islice
from pathlib import Path

from settings import parse_settings

from nmt.data.corpus import iter_column, load_pairs
from nmt.runs.checkpoint import find_checkpoint, load_config
from nmt.system.quoting import quote_for_hydra

PYTHON = [sys.executable, "-m"]
HEAD = b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n"


class Client:
    """Sends lines over one connection until a time, and keeps the seconds and the time of each answer."""

    def __init__(self, port: int, lines: list[str], expected: dict[str, str], direction: dict[str, str]) -> None:
        self.port, self.lines, self.expected, self.direction = port, lines, expected, direction
        self.seconds: list[float] = []
        self.arrival_times: list[float] = []
        self.errors: list[str] = []

    async def run(self, until: float) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        for line in cycle(self.lines):
            started = time.perf_counter()
            if started > until:
                break
            body = json.dumps({"q": line, **self.direction}).encode()
            writer.write(HEAD % len(body) + body)
            status = await reader.readuntil(b"\r\n\r\n")
            answer = await reader.readexactly(int(re.findall(rb"content-length: (\d+)", status)[0]))
            self.arrival_times.append(time.perf_counter())
            self.seconds.append(self.arrival_times[-1] - started)
            if json.loads(answer) != {"translatedText": self.expected[line]}:
                self.errors.append(answer.decode())
        writer.close()


async def run_clients(clients: list[Client], seconds: float) -> float:
    """Run all clients together. Returns the answers per second while all of them were busy."""
    until = time.perf_counter() + seconds
    await asyncio.gather(*(client.run(until) for client in clients))
    all_busy = max(min(client.arrival_times, default=until) for client in clients)
    if all_busy >= until:
        sys.exit(f"a client had its first answer only after {seconds:g} seconds; use a larger number for seconds=")
    return sum(all_busy < each <= until for client in clients for each in client.arrival_times) / (until - all_busy)


def processor_seconds() -> float:
    """Return the processor time of the processes that this one has started and that have ended."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def start_server(arguments: list[str], log: Path) -> tuple["subprocess.Popen[bytes]", int]:
    """Start the server at a free port. Returns its process and the port."""
    with open(log, "wb") as file:
        server = subprocess.Popen([*PYTHON, "nmt.serve", *arguments, "port=0"], stderr=file)
    while not (port := re.findall(r"at http://127.0.0.1:(\d+)", log.read_text())):
        if server.poll() is not None:
            sys.exit(log.read_text())
        time.sleep(0.1)
    return server, int(port[0])


def main() -> None:
    settings = parse_settings(
        run="", seconds="10", clients="20", rounds="3", lines="2000", search="search.beam=5", folder="runs/bench_serve"
    )
    if not settings["run"]:
        sys.exit(__doc__)
    folder = Path(settings["folder"])
    folder.mkdir(parents=True, exist_ok=True)
    data = load_config(find_checkpoint(settings["run"])[0]).data
    direction = {"source": data.source.rpartition(".")[2], "target": data.target.rpartition(".")[2]}
    lines = list(islice(cycle(iter_column(load_pairs(data, "test"), "source")), int(settings["lines"])))
    arguments = [f"checkpoint={quote_for_hydra(settings['run'])}", *settings["search"].split()]
    files = {name: folder / f"{name}.txt" for name in ("one", "all", "translated")}
    files["one"].write_text(lines[0] + "\n", encoding="utf-8")
    files["all"].write_text("".join(line + "\n" for line in lines), encoding="utf-8")

    def translate(name: str) -> tuple[float, float]:
        """Return the seconds, and those of the processor, of the command `nmt.translate` on a file."""
        started = time.perf_counter(), processor_seconds()
        names = [
            f"{key}={quote_for_hydra(str(files[file]))}" for key, file in (("input", name), ("output", "translated"))
        ]
        subprocess.run([*PYTHON, "nmt.translate", *arguments, *names], check=True)
        return time.perf_counter() - started[0], processor_seconds() - started[1]

    command, served, answers, errors = [], [], [], []
    for number in range(int(settings["rounds"])):
        (loading, loading_cpu), (whole, whole_cpu) = translate("one"), translate("all")
        command.append((len(lines) / (whole - loading), len(lines) / (whole_cpu - loading_cpu)))
        expected = dict(zip(lines, files["translated"].read_text(encoding="utf-8").split("\n"), strict=False))
        before = processor_seconds()
        server, port = start_server(arguments, folder / "server.log")
        count = int(settings["clients"])
        starts = [index * len(lines) // count for index in range(count)]
        clients = [Client(port, lines[start:] + lines[:start], expected, direction) for start in starts]
        try:
            speed = asyncio.run(run_clients(clients, float(settings["seconds"])))
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait()
        seconds = [each for client in clients for each in client.seconds]
        errors += [error for client in clients for error in client.errors]
        served.append((speed, len(seconds) / (processor_seconds() - before - loading_cpu)))
        answers += seconds
        print(
            f"round {number + 1}: nmt.translate {command[-1][0]:.1f} lines/s, nmt.serve {served[-1][0]:.1f}", flush=True
        )
    percentiles = statistics.quantiles(answers, n=100)
    print(
        f"\n{settings['clients']} clients for {settings['seconds']} s, {os.cpu_count()} cores: {len(answers):,} "
        f"answers, {len(errors)} of them wrong; medians of {settings['rounds']} rounds"
    )
    for index, unit in enumerate(("lines/s", "lines/s of processor time")):
        ours, theirs = (statistics.median(speed[index] for speed in speeds) for speeds in (served, command))
        print(f"nmt.serve {ours:.1f} {unit}, nmt.translate {theirs:.1f}, ratio {ours / theirs:.2f}")
    print(
        f"seconds until an answer: median {percentiles[49]:.3f}, p95 {percentiles[94]:.3f}, maximum {max(answers):.3f}"
    )
    if errors:
        sys.exit(f"first wrong answer: {errors[0]}")


if __name__ == "__main__":
    main()
