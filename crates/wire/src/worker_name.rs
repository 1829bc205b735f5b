//! What a worker may be called: its name goes into headers, metrics and the topic of its KV events, so it must be fit
//! for all of them. Said once, for those who start workers and those who name them.

/// Characters of a name at most.
const NAME_MAX: usize = 64;

/// What a name is expected to be, for messages.
pub const EXPECTED_WORKER_NAME: &str = "1 to 64 letters, digits, `-`, `_` or `.`";

/// Whether a worker may be called so.
#[must_use]
pub fn is_worker_name(name: &str) -> bool {
    let fits = |byte: u8| byte.is_ascii_alphanumeric() || matches!(byte, b'-' | b'_' | b'.');
    (1..=NAME_MAX).contains(&name.len()) && name.bytes().all(fits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_fit_for_headers_and_topics() {
        for good in ["d0", "gpu-3.rack_7", "A", &"x".repeat(64)] {
            assert!(is_worker_name(good), "{good}");
        }
        for bad in ["", "a b", "a/b", "é", "a@b", "a\n", "a\"b", &"x".repeat(65)] {
            assert!(!is_worker_name(bad), "{bad}");
        }
    }
}
