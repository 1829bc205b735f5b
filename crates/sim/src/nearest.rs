//! The known name that a wrong one was most likely meant to be.

/// The name with the fewest letters to change, drop or add; the first of equals.
pub(crate) fn nearest<'n>(given: &str, names: impl Iterator<Item = &'n str>) -> Option<&'n str> {
    names.min_by_key(|known| edits(given.as_bytes(), known.as_bytes()))
}

/// Levenshtein's distance, one row at a time.
fn edits(from: &[u8], to: &[u8]) -> usize {
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (index, left) in from.iter().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], index + 1);
        for (place, right) in to.iter().enumerate() {
            let changed = diagonal + usize::from(left != right);
            diagonal = row[place + 1];
            row[place + 1] = changed.min(diagonal + 1).min(row[place] + 1);
        }
    }
    row[to.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_nearest_name_is_found() {
        let check = |given: &str, names: &[&str], expected: Option<&str>| {
            assert_eq!(nearest(given, names.iter().copied()), expected, "{given}");
        };
        check("h20x8-dq", &["h100x8-dp", "h20x8-dp"], Some("h20x8-dp"));
        check(
            "transfer-timeout",
            &["probe", "transfer_timeout"],
            Some("transfer_timeout"),
        );
        check("", &["rho", "kv"], Some("kv"));
        check("x", &[], None);
        assert_eq!(edits(b"kitten", b"sitting"), 3);
        assert_eq!(edits(b"flaw", b"lawn"), 2);
    }
}
