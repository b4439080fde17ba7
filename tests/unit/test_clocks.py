"""Who reads the clock on the wall, which may jump. Deadlines, leases, ages and rates go by one that does not."""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]

READS = {"time.time", "time.time_ns", "datetime.now", "datetime.utcnow", "datetime.today", "date.today"}

ALLOWED = {
    "actors/learning/history.py": "when a version was trained, as it is told",
    "actors/observability/round_tracer.py": "spans, which are told by the time of day",
    "actors/serve_seam/steady_time.py": "from where on Serve's processes count by the monotonic clock",
    "actors/learning/versions.py": "the age of what was left unfinished, as of files",
    "actors/serving/grpc/servicer.py": "GetServerInfo says when the server started",
    "actors/serving/access/guard.py": "keys expire by the day",
    "actors/serving/access/tls.py": "certificates likewise",
    "actors/vllm_seam/engine_requests.py": "vLLM's own arrival_time, for one figure, not below 0",
    "deploy/cli/keys.py": "when keys expire",
    "deploy/models/identity.py": "the age of files, whose times are the day's",
}


def reads(path: Path) -> set[str]:
    last = {name.rpartition(".")[2] for name in READS}
    nodes = ast.walk(ast.parse(path.read_text()))
    found = {ast.unparse(node) for node in nodes if isinstance(node, ast.Attribute) and node.attr in last}
    return {name for name in found for read in READS if name == read or name.endswith(f".{read}")}


def test_only_what_is_about_the_time_of_day_reads_it() -> None:
    folders = [ROOT / name for name in ("actors", "cluster", "deploy")]
    files = [path for folder in folders for path in folder.rglob("*.py")]
    assert len(files) > 100
    # Measuring, which nothing is decided by.
    served = [path for path in files if not {"bench", "distill"} & set(path.relative_to(ROOT).parts)]
    assert {str(path.relative_to(ROOT)) for path in served if reads(path)} == set(ALLOWED)
