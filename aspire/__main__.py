"""``python -m aspire``."""

from __future__ import annotations

from aspire.cli.main import main

main()
