"""Writers of autotune records that are killed: all that was acknowledged stays."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.reliability

WRITERS, RECORDS = 16, 64

# A process without torch, whose children may be forked and killed by the hundred.
NURSERY = """
import json, os, random, signal, sys, time
from pathlib import Path
from ipex_inductor.autotune.database import Records, Shard, digest
from support.autotune.autotune_records import LIBRARY, TILES, record, timed

folder, writers, count, kills = Path(sys.argv[1]), *map(int, sys.argv[2:])
rng = random.Random(0)
turns = [0] * writers  # who is through before the last kill begins again with other records
acknowledged, written = [set() for _ in range(writers)], set()

def wanted(writer, number):
    times = timed(LIBRARY, 1.0 + number), timed(TILES[0], 2.0 + writer + turns[writer] / 1024)
    return record(*times, rows=1 + number)

def start(writer):
    read, write = os.pipe()
    child = os.fork()
    if child:
        os.close(write)
        return child, read
    shard, pause = Shard(folder), random.Random(os.getpid())
    for number in range(count):
        if number not in acknowledged[writer]:
            shard.append(wanted(writer, number))
            os.write(write, bytes([number]))
            time.sleep(pause.uniform(0, 1e-2))
    os._exit(0)

def collect(writer, read):
    while numbers := os.read(read, 1 << 12):
        acknowledged[writer].update(numbers)
        written.update(digest(wanted(writer, number)) for number in numbers)
    os.close(read)

running, killed = {}, 0
while killed < kills or any(len(numbers) < count for numbers in acknowledged):
    for writer in range(writers):
        if writer not in running:
            if killed < kills and len(acknowledged[writer]) == count:
                turns[writer] += 1
                acknowledged[writer].clear()
            running[writer] = start(writer)
    if killed < kills:
        time.sleep(rng.uniform(0, 2e-3))
        writer = rng.choice(list(running))
        child, read = running.pop(writer)
        os.kill(child, signal.SIGKILL)
        killed += os.WIFSIGNALED(os.waitpid(child, 0)[1])
        collect(writer, read)
    else:
        for writer, (child, read) in running.items():
            collect(writer, read)
            os.waitpid(child, 0)
        running.clear()
found = Records(folder)
digests = {digest(r) for r in found}
print(json.dumps({
    "killed": killed,
    "acknowledged": len(written),
    "lost": len(written - digests),
    "others": len(digests - written),
    "refused": [refusal.reason for refusal in found.refused],
    "files": len(list(folder.iterdir())),
}))
"""


@pytest.mark.parametrize("kills", [100, pytest.param(500, marks=pytest.mark.slow)])
def test_killed_writers_lose_nothing_that_was_acknowledged(tmp_path, kills):
    tests = Path(__file__).parents[1]
    ran = subprocess.run(
        [sys.executable, "-c", NURSERY, tmp_path, *map(str, (WRITERS, RECORDS, kills))],
        env={**os.environ, "PYTHONPATH": f"{tests}:{os.environ.get('PYTHONPATH', '')}"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr
    result = json.loads(ran.stdout)
    print(result)
    assert result["killed"] == kills
    assert result["acknowledged"] >= WRITERS * RECORDS
    assert result["lost"] == 0
    assert result["others"] <= kills  # on the disk, and killed before saying so
    assert all("not a whole record" in reason for reason in result["refused"])
