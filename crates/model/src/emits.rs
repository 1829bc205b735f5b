//! Sums of texts that a template prints, printed piece by piece.
//!
//! Most templates print a message as `{{ '<|im_start|>' + message.role + '\n' + message.content + '<|im_end|>' }}`. Each `+`
//! copies the text so far, twice, and a long conversation is half a megabyte. Here such a template's source is changed so
//! that it hands all pieces to a function that writes them one after the other. It does so for texts only; whatever else is
//! added up, and whatever fails, is for the template as it was: the caller renders that one then.
//!
//! It changes no expression that it does not understand to the last character, and no template that declares text raw.

use minijinja::value::{Object, ObjectRepr, Rest};
use minijinja::{Error, ErrorKind, Value};
use std::fmt;
use std::sync::Arc;

/// The function's name in templates.
pub(crate) const PRINT_PIECES: &str = "homing_print_pieces";

/// Words that make an expression more than a sum.
const OPERATORS: [&str; 9] = ["if", "else", "and", "or", "not", "in", "is", "for", "recursive"];

/// Texts that are printed one after the other.
#[derive(Debug)]
struct Pieces(Vec<Value>);

impl Object for Pieces {
    fn repr(self: &Arc<Self>) -> ObjectRepr {
        ObjectRepr::Plain
    }

    fn render(self: &Arc<Self>, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0
            .iter()
            .filter_map(Value::as_str)
            .try_for_each(|text| f.write_str(text))
    }
}

/// What the changed templates call.
pub(crate) fn print_pieces(pieces: Rest<Value>) -> Result<Value, Error> {
    if pieces.iter().all(|piece| piece.as_str().is_some()) {
        return Ok(Value::from_object(Pieces(pieces.0)));
    }
    Err(Error::new(ErrorKind::InvalidOperation, "a piece is no text"))
}

/// The source with its printed sums changed; `None` where it has none, or where it is better left alone.
pub(crate) fn with_pieces(source: &str) -> Option<String> {
    if source.contains(PRINT_PIECES) {
        return None;
    }
    let (mut changed, mut rest, mut sums) = (String::with_capacity(source.len() + 64), source, 0);
    while let Some(at) = next_tag(rest) {
        let (before, tag) = rest.split_at(at);
        changed += before;
        let (opening, inside) = tag.split_at(2);
        let length = match opening {
            "{#" => inside.find("#}")?,
            "{%" => end_of(inside, "%}")?,
            _ => end_of(inside, "}}")?,
        };
        let expression = &inside[..length];
        let is_raw = opening == "{%" && expression.trim_matches(['-', '+', ' ', '\t', '\n', '\r']) == "raw";
        if is_raw {
            return None;
        }
        let sum = (opening == "{{").then(|| as_pieces(expression)).flatten();
        sums += usize::from(sum.is_some());
        changed += opening;
        changed += sum.as_deref().unwrap_or(expression);
        changed += &inside[length..length + 2];
        rest = &inside[length + 2..];
    }
    changed += rest;
    (sums > 0).then_some(changed)
}

/// Where the next tag of any kind begins.
fn next_tag(text: &str) -> Option<usize> {
    let opens = |pair: &[u8]| pair[0] == b'{' && matches!(pair[1], b'{' | b'%' | b'#');
    text.as_bytes().windows(2).position(opens)
}

/// Where a tag's `closing` is, outside of its texts and brackets.
fn end_of(inside: &str, closing: &str) -> Option<usize> {
    let mut outside = Outside::new(inside);
    outside
        .find(|(at, _)| inside[*at..].starts_with(closing))
        .map(|(at, _)| at)
}

/// A sum as a call, with the marks that trim white space around its tag; `None` if it is anything else.
fn as_pieces(expression: &str) -> Option<String> {
    let inside = expression.strip_prefix(['-', '+']).unwrap_or(expression);
    let sum = inside.strip_suffix(['-', '+']).unwrap_or(inside);
    let (before, after) = (&expression[..expression.len() - inside.len()], &inside[sum.len()..]);
    let pieces = pieces(sum)?;
    Some(format!("{before} {PRINT_PIECES}({}) {after}", pieces.join(", ")))
}

/// What is added up, where one of it is a text that the template spells out: the sum is a text then, or an error.
fn pieces(sum: &str) -> Option<Vec<&str>> {
    let (mut pieces, mut from) = (Vec::new(), 0);
    for (at, character) in Outside::new(sum) {
        match character {
            '+' => {
                pieces.push(sum[from..at].trim());
                from = at + 1;
            }
            '.' | '|' | '_' | '\'' | '"' | '(' | ')' | '[' | ']' => {}
            plain if plain.is_ascii_alphanumeric() || plain.is_ascii_whitespace() => {}
            _ => return None,
        }
    }
    pieces.push(sum[from..].trim());
    let is_text = |piece: &&str| {
        let quote = piece.chars().next().filter(|first| matches!(first, '\'' | '"'));
        quote.is_some_and(|quote| Outside::new(piece).map(|(_, character)| character).eq([quote, quote]))
    };
    let is_operand = |piece: &&str| {
        let words = |word: &str| OPERATORS.contains(&word);
        !piece.is_empty()
            && !outside_of(piece)
                .split(|c: char| !c.is_alphanumeric() && c != '_')
                .any(words)
    };
    let is_sum = pieces.len() > 1 && pieces.iter().all(is_operand) && pieces.iter().any(is_text);
    is_sum.then_some(pieces)
}

/// An expression without its texts and without what is in brackets.
fn outside_of(expression: &str) -> String {
    Outside::new(expression).map(|(_, character)| character).collect()
}

/// The characters of an expression that stand in no text and in no bracket, with their places; the quotes and the outermost
/// brackets themselves are among them.
struct Outside<'a> {
    characters: std::str::CharIndices<'a>,
    depth: usize,
    /// The text that has begun ends with this.
    quote: Option<char>,
}

impl<'a> Outside<'a> {
    fn new(expression: &'a str) -> Self {
        Self {
            characters: expression.char_indices(),
            depth: 0,
            quote: None,
        }
    }

    /// Passes over the rest of a text.
    fn close(&mut self, quote: char) -> Option<(usize, char)> {
        while let Some((at, character)) = self.characters.next() {
            match character {
                '\\' => drop(self.characters.next()),
                end if end == quote => return Some((at, end)),
                _ => {}
            }
        }
        None
    }
}

impl Iterator for Outside<'_> {
    type Item = (usize, char);

    fn next(&mut self) -> Option<(usize, char)> {
        if let Some(quote) = self.quote.take() {
            return self.close(quote);
        }
        loop {
            let (at, character) = self.characters.next()?;
            let was_outside = self.depth == 0;
            match character {
                '\'' | '"' if was_outside => self.quote = Some(character),
                '\'' | '"' => drop(self.close(character)?),
                '(' | '[' | '{' => self.depth += 1,
                ')' | ']' | '}' => self.depth = self.depth.saturating_sub(1),
                _ => {}
            }
            if was_outside || self.depth == 0 && matches!(character, ')' | ']' | '}') {
                return Some((at, character));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn printed_sums_with_a_text_are_changed_and_nothing_else() {
        let check = |source: &str, expected: &str| {
            let expected = expected.replace("pp", PRINT_PIECES);
            let expected = (expected != source).then_some(expected);
            assert_eq!(with_pieces(source), expected, "{source}");
        };
        let same = |source: &str| check(source, source);
        check("a{{ x + 'b' }}c", "a{{ pp(x, 'b') }}c");
        check("{{- 'a' + m['r'] + \"\\n\" -}}", "{{- pp('a', m['r'], \"\\n\") -}}");
        check(
            "{{'<a>'+m.content|trim+'}}'}}{{x}}",
            "{{ pp('<a>', m.content|trim, '}}') }}{{x}}",
        );
        check(
            "{{ 'a' + f(x + y, {'k': ')'})[0] }}",
            "{{ pp('a', f(x + y, {'k': ')'})[0]) }}",
        );
        check(
            "{# {{ 'a' + b }} #}{% if x == '%}' %}{{ 'a' + b }}{% endif %}",
            "{# {{ 'a' + b }} #}{% if x == '%}' %}{{ pp('a', b) }}{% endif %}",
        );
        same("{{ x }} + 'b'");
        same("{{ 'a' }}{{ 'a + b' }}{{ ('a' + b) }}");
        same("{{ x + y }}{{ 1 + 2 }}{{ x['a'] + y }}");
        same("{{ 'a' + b if c else d }}");
        same("{{ 'a' + b ~ c }}{{ 'a' + b * 2 }}{{ 'a' + b - c }}{{ 'a' + b == c }}");
        same("{{ 'a' + b is defined }}{{ not 'a' + b }}{{ 'a' + b in c }}");
        same("{{ 'a' 'b' + c }}{{ + 'a' }}{{ 'a' + }}");
        same("{% set x = 'a' + b %}{% raw %}{{ 'a' + b }}{% endraw %}");
        same("{{ 'a' + b");
        same("{# {{ 'a' + b }}");
    }
}
