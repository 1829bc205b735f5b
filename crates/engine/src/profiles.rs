//! The built-in step-time profiles: the TOML files of `profiles/`, so that a user's own model starts as a copy of one.
//!
//! Every profile takes the vLLM column of its source; the H20 has no measured table (its file says what was done). Which
//! file is which is all that is known here; the format is [`crate::StepModel`].

/// Name and text of each profile.
const PROFILES: [(&str, &str); 6] = [
    ("h100-qwen3-30b", include_str!("../profiles/h100-qwen3-30b.toml")),
    ("h200-qwen3-30b", include_str!("../profiles/h200-qwen3-30b.toml")),
    ("h20-qwen3-30b", include_str!("../profiles/h20-qwen3-30b.toml")),
    ("b200-qwen3-30b", include_str!("../profiles/b200-qwen3-30b.toml")),
    ("h100-llama3-8b", include_str!("../profiles/h100-llama3-8b.toml")),
    (
        "h100-qwen3-32b-tp2",
        include_str!("../profiles/h100-qwen3-32b-tp2.toml"),
    ),
];

/// The names, in the order of the documentation.
pub fn names() -> impl Iterator<Item = &'static str> {
    PROFILES.iter().map(|(name, _)| *name)
}

/// The text of the profile of this name.
pub fn text(name: &str) -> Option<&'static str> {
    PROFILES.iter().find(|(known, _)| *known == name).map(|(_, text)| *text)
}
