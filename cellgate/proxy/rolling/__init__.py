"""Rolling: units get new software cell by cell, one gate conducts it, and others go on when it dies."""
