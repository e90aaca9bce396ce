"""What verl's plugin group loads: installs the hook when it is imported."""

from __future__ import annotations

import logging
import os

if os.environ.get("MISMATCH_AUDIT_CONTRACT"):
    try:
        from mismatch_audit.trainers.verl_plugin import install

        install()
    except Exception:
        # verl hides a plugin's exceptions at debug level; an audit that did not start must be seen.
        logging.getLogger("mismatch_audit").exception("mismatch-audit: verl is not audited")
        raise
