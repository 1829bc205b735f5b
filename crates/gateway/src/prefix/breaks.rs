//! Two requests of one session compared: what changed, and what it cost.
//!
//! The cost is counted in tokens of the two prompts, not guessed from messages: of what both have room for, all that
//! lies behind the first block that differs is computed again. A tool or the system prompt stands before all messages in
//! common templates, but it is the blocks that say what a change did.

use super::outline::{Fresh, Outline, Seen};
use homing_kv::Prompt;
use serde::Serialize;

/// Why a prompt does not repeat the one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum BreakKind {
    /// A line of the system prompt with a date or a time in it.
    DateLine,
    /// Claude Code's billing line, whose `cch=` differs at each request.
    BillingLine,
    /// Another change of the system prompt.
    System,
    /// The same tools in another order.
    ToolsReordered,
    /// Other tools.
    Tools,
    /// The history was cut short or summed up.
    Compaction,
    /// A message in the middle was edited.
    Edit,
    /// All messages are the same and were rendered otherwise: a template that drops earlier thoughts, say.
    Rendering,
}

impl BreakKind {
    /// Its name in metrics and logs.
    pub(crate) const fn as_str(self) -> &'static str {
        match self {
            Self::DateLine => "date_line",
            Self::BillingLine => "billing_line",
            Self::System => "system",
            Self::ToolsReordered => "tools_reordered",
            Self::Tools => "tools",
            Self::Compaction => "compaction",
            Self::Edit => "edit",
            Self::Rendering => "rendering",
        }
    }
}

/// A break of a session's prefix.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub(crate) struct Break {
    /// What changed.
    pub(crate) kind: BreakKind,
    /// The first message that differs, where a message does.
    pub(crate) message: Option<usize>,
    /// Prompt tokens that are computed again because of it.
    pub(crate) lost_tokens: u32,
}

/// Blocks at a prompt's end that may differ without anything having changed: the answer's opening is rendered
/// otherwise once the answer is known.
const END_BLOCKS: u32 = 2;

/// Compares a request with an earlier one of its session; `None` where it goes on from it, repeats it, or cost nothing.
pub(super) fn compare(earlier: &Seen, fresh: &Fresh, prompt: &Prompt, block_size: u32) -> Option<Break> {
    let common = common_length(&earlier.prompt.blocks, &prompt.blocks);
    let common_tokens = u32::try_from(common).unwrap_or(u32::MAX).saturating_mul(block_size);
    let lost_tokens = earlier.prompt.tokens.min(prompt.tokens).saturating_sub(common_tokens);
    if lost_tokens < END_BLOCKS * block_size {
        return None;
    }
    let (kind, message) = cause(&earlier.outline, fresh);
    Some(Break {
        kind,
        message,
        lost_tokens,
    })
}

fn cause(earlier: &Outline, fresh: &Fresh) -> (BreakKind, Option<usize>) {
    let now = &fresh.outline;
    if earlier.tools != now.tools {
        let sorted = |tools: &[u64]| {
            let mut tools = tools.to_vec();
            tools.sort_unstable();
            tools
        };
        let same = sorted(&earlier.tools) == sorted(&now.tools);
        return (
            if same {
                BreakKind::ToolsReordered
            } else {
                BreakKind::Tools
            },
            None,
        );
    }
    if earlier.system != now.system {
        return (of_system(earlier, fresh), Some(0));
    }
    let same = common_length(&earlier.messages, &now.messages);
    if same == earlier.messages.len().min(now.messages.len()) {
        return (BreakKind::Rendering, None);
    }
    let kind = if now.messages.len() < earlier.messages.len() {
        BreakKind::Compaction
    } else {
        BreakKind::Edit
    };
    (kind, Some(same))
}

/// The change of a system prompt, from the first line that differs.
fn of_system(earlier: &Outline, fresh: &Fresh) -> BreakKind {
    let line = common_length(&earlier.system, &fresh.outline.system);
    match fresh.system_text.split('\n').nth(line) {
        Some(line) if is_billing_line(line) => BreakKind::BillingLine,
        Some(line) if is_date_line(line) => BreakKind::DateLine,
        Some(_) | None => BreakKind::System,
    }
}

/// Whether it begins as Claude Code's billing line does.
pub(super) fn is_billing_line(line: &str) -> bool {
    line.trim_start().starts_with(super::canonical::BILLING_LINE)
}

/// Whether a line says what day or time it is: one of the usual words, and a digit.
pub(super) fn is_date_line(line: &str) -> bool {
    const WORDS: [&str; 7] = [
        "today's date",
        "today is",
        "current date",
        "current time",
        "currentdate",
        "date and time",
        "current_date",
    ];
    /// What is longer than a line of this kind is text that happens to speak of a date.
    const LENGTH_MAX: usize = 200;
    line.len() <= LENGTH_MAX && line.bytes().any(|byte| byte.is_ascii_digit()) && {
        let line = line.to_ascii_lowercase();
        WORDS.iter().any(|word| line.contains(word))
    }
}

fn common_length<T: PartialEq>(one: &[T], other: &[T]) -> usize {
    one.iter().zip(other).take_while(|(one, other)| one == other).count()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::prefix::outline::elements;
    use homing_wire::openai::Body;
    use serde_json::{Value, json};

    const BLOCK: u32 = 4;

    /// Each character of the rendered conversation is a token.
    fn fresh(tools: &Value, messages: &Value) -> (Fresh, Prompt) {
        let body = json!({"tools": tools, "messages": messages}).to_string();
        let body = Body::parse(&body.into()).unwrap();
        let fresh = Fresh::of_chat(&body, &elements(body.get("messages")), None);
        let rendered = format!("{tools}{messages}");
        let tokens: Vec<u32> = rendered.trim_end_matches(']').chars().map(u32::from).collect();
        (fresh, Prompt::of_tokens(&tokens, BLOCK))
    }

    fn seen((fresh, prompt): (Fresh, Prompt)) -> Seen {
        let outline = fresh.outline;
        Seen { outline, prompt }
    }

    fn check(before: (&Value, &Value), after: (&Value, &Value), expected: Option<(BreakKind, Option<usize>)>) {
        let (after_request, prompt) = fresh(after.0, after.1);
        let found = compare(&seen(fresh(before.0, before.1)), &after_request, &prompt, BLOCK);
        assert_eq!(
            found.map(|found| (found.kind, found.message)),
            expected,
            "{before:?} {after:?}"
        );
    }

    fn message(role: &str, text: &str) -> Value {
        json!({"role": role, "content": text})
    }

    #[test]
    fn what_changed_is_found() {
        let tools = json!([{"a": "x"}, {"b": "y"}]);
        let system = |text: &str| message("system", text);
        let talk = |head: &str, rest: &[&str]| {
            let rest = rest.iter().map(|text| message("user", text));
            Value::Array(std::iter::once(system(head)).chain(rest).collect())
        };
        let before = talk(
            "You help.\nToday's date: 2026-11-30\nBe kind.",
            &["one", "two", "three"],
        );
        let same = |after: &Value, expected| check((&tools, &before), (&tools, after), expected);
        same(&before, None);
        same(
            &talk(
                "You help.\nToday's date: 2026-11-30\nBe kind.",
                &["one", "two", "three", "four"],
            ),
            None,
        );
        same(&talk("You help.\nToday's date: 2026-11-30\nBe kind.", &["one"]), None);
        same(
            &talk(
                "You help.\nToday's date: 2026-12-01\nBe kind.",
                &["one", "two", "three", "four"],
            ),
            Some((BreakKind::DateLine, Some(0))),
        );
        same(
            &talk(
                "You help.\nToday's date: 2026-11-30\nBe rude.",
                &["one", "two", "three", "four"],
            ),
            Some((BreakKind::System, Some(0))),
        );
        same(
            &talk(
                "You help.\nToday's date: 2026-11-30\nBe kind.",
                &["one", "TWO", "three", "four"],
            ),
            Some((BreakKind::Edit, Some(2))),
        );
        same(
            &talk(
                "You help.\nToday's date: 2026-11-30\nBe kind.",
                &["a summary of all that was said"],
            ),
            Some((BreakKind::Compaction, Some(1))),
        );
        let reordered = json!([{"b": "y"}, {"a": "x"}]);
        check(
            (&tools, &before),
            (&reordered, &before),
            Some((BreakKind::ToolsReordered, None)),
        );
        let more = json!([{"a": "x"}, {"c": "z"}, {"b": "y"}]);
        check((&tools, &before), (&more, &before), Some((BreakKind::Tools, None)));
        let billed = |cch: &str| {
            talk(
                &format!("x-anthropic-billing-header: cc_version=1; cch={cch};You help."),
                &["one"],
            )
        };
        check(
            (&tools, &billed("aaaaa")),
            (&tools, &billed("bbbbb")),
            Some((BreakKind::BillingLine, Some(0))),
        );
    }

    #[test]
    fn what_it_cost_is_counted_in_tokens() {
        let tools = json!([]);
        let talk = |middle: &str| {
            Value::Array(
                [
                    message("user", "start"),
                    message("user", middle),
                    message("user", &"x".repeat(400)),
                ]
                .to_vec(),
            )
        };
        let (after, prompt) = fresh(&tools, &talk("b"));
        let found = compare(&seen(fresh(&tools, &talk("a"))), &after, &prompt, BLOCK).unwrap();
        let total = prompt.tokens;
        assert!(
            found.lost_tokens > 400 && found.lost_tokens < total - 40,
            "{found:?} of {total}"
        );
        assert_eq!(found.message, Some(1));
    }

    #[test]
    fn lines_that_say_the_time_are_known() {
        for (line, expected) in [
            ("Today's date: 2026-11-30", true),
            ("  <current_date>2026-11-30</current_date>", true),
            ("Current time is 12:00:03.", true),
            ("Today is a good day.", false),
            ("Never guess the current date.", false),
        ] {
            assert_eq!(is_date_line(line), expected, "{line}");
        }
    }
}
