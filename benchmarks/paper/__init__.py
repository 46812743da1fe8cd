"""Both papers' evaluations, figure by figure: the papers' values and ours."""
