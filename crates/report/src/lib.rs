//! The run schema and its statistics.
