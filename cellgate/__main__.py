"""`python -m cellgate` is `cellgate`."""

from cellgate.proxy.cli.commands import main

raise SystemExit(main())
