"""Where the parts of the repository lie."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "src"
DOCS = ROOT / "docs"
EXAMPLES = ROOT / "examples"
BENCHMARKS = ROOT / "benchmarks"
TOOLS = ROOT / "tools"
NET = ROOT / "tests" / "net"
FIXTURES = NET / "fixtures"
