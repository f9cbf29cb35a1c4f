"""Pipeline stages of a model, each on ranks of its own, which compute on the output of the stage before."""
