from tests.faults.mutated_core import load_named_by_environment

load_named_by_environment()  # here, before anything imports the core
