"""`python -m proxy` is `cellgate`."""

from proxy.cli import main

raise SystemExit(main())
