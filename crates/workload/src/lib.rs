//! Trace formats, session DAGs, generators and the causal order in which turns are sent.
