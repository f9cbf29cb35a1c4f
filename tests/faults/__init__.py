import os

from tests.faults.mutated_core import load_named_by_environment

load_named_by_environment()  # here, before anything imports the core
# Tests and campaigns speak to roles by plain gRPC, too, whatever certificates this user's clusters have; those with
# certificates name their folder themselves: tests/integration/security.
os.environ.setdefault("GEARTRAIN_SECURITY__FOLDER", "none")
