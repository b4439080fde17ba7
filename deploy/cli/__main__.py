"""``python -m outrider.deploy.cli``: the ``outrider`` command."""

import sys

from outrider.deploy.cli import main

sys.exit(main())
