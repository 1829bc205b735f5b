//! Token blocks: chained hashes, the radix index with owners, the paged pool and its eviction.
