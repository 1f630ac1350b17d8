"""Where rewards to be measured come from: a file of ours, a running server, a model of others."""
