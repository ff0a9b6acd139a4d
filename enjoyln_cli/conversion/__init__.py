"""The order of the steps of each job: inspecting, folding, rotating."""
