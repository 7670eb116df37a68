"""The Kubernetes API as the operator and the agent use it: few calls, typed, fast, with deadlines."""
