//! GPT-2's alphabet: a printable character for each byte, in which byte-level vocabularies and their merges are written.

/// How GPT-2's alphabet spells a byte: printable Latin-1 characters as themselves, the others as those from U+0100 on.
pub(crate) fn spelling(byte: u8) -> char {
    if is_spelled_as_itself(byte) {
        return char::from(byte);
    }
    let before = (0..byte).filter(|other| !is_spelled_as_itself(*other)).count();
    u32::try_from(before)
        .ok()
        .and_then(|before| char::from_u32(0x100 + before))
        .expect("fewer than 256 characters follow U+0100")
}

fn is_spelled_as_itself(byte: u8) -> bool {
    matches!(byte, b'!'..=b'~' | 0xa1..=0xac | 0xae..=0xff)
}

/// The bytes that a token spells, or `None` if it holds a character outside the alphabet.
pub(crate) fn spelled_bytes(text: &str) -> Option<Vec<u8>> {
    static ALPHABET: std::sync::LazyLock<Vec<(char, u8)>> = std::sync::LazyLock::new(|| {
        let mut alphabet: Vec<_> = (0..=u8::MAX).map(|byte| (spelling(byte), byte)).collect();
        alphabet.sort_unstable();
        alphabet
    });
    let byte = |character: char| {
        let index = ALPHABET
            .binary_search_by_key(&character, |(spelling, _)| *spelling)
            .ok()?;
        Some(ALPHABET[index].1)
    };
    text.chars().map(byte).collect()
}
