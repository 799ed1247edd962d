"""MLflow tracking: the store, one run per tuning session and trial, the policy registry, and the UI.

Nothing here uses MLflow's active run. Every call names its run, so what is logged depends neither on the
thread or process nor on the caller's MLflow variables. Importing MLflow takes seconds: import these modules
where they are needed.
"""
