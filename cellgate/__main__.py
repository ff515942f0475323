"""`python -m cellgate` is `cellgate`."""

from cellgate.proxy.cli.main import main

raise SystemExit(main())
