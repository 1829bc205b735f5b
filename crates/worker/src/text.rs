//! From tokens to text as they come, up to a stop string that may span tokens.
//!
//! Text is held back while it could still become part of a character (the decoder's business) or of a stop string, so
//! what a client has seen is never taken back. Both waits are bounded: by three bytes and by the longest stop string.

use homing_model::{StreamDecoder, Tokenizer};

/// When an output's text ends it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StopStrings {
    /// The output ends before (or with) the first occurrence of any of these. None is empty.
    pub strings: Vec<String>,
    /// Whether the stop string is part of the output.
    pub include: bool,
}

/// One request's output text.
pub struct TextStream {
    stops: StopStrings,
    decoder: StreamDecoder,
    /// Text that may be the beginning of a stop string.
    held: String,
}

/// What a token added.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Piece {
    /// Text that can be shown.
    pub text: String,
    /// The stop string that ended the output.
    pub stopped_by: Option<String>,
}

impl TextStream {
    /// A stream that has seen no token.
    #[must_use]
    pub fn new(tokenizer: &Tokenizer, stops: StopStrings) -> Self {
        debug_assert!(
            stops.strings.iter().all(|stop| !stop.is_empty()),
            "an empty stop string would stop everything"
        );
        Self {
            stops,
            decoder: tokenizer.stream(),
            held: String::new(),
        }
    }

    /// Adds a token. Stop strings count only where the output `may_stop`: what came before is shown and cannot be part
    /// of one any more.
    pub fn push(&mut self, token: u32, may_stop: bool) -> Piece {
        let fresh = self.decoder.push(token);
        if may_stop {
            self.take(&fresh)
        } else {
            Piece {
                text: fresh,
                stopped_by: None,
            }
        }
    }

    /// What was held back, when the output ends for another reason than a stop string.
    pub fn finish(&mut self) -> String {
        let mut text = std::mem::take(&mut self.held);
        text.push_str(&self.decoder.finish());
        text
    }

    fn take(&mut self, fresh: &str) -> Piece {
        self.held.push_str(fresh);
        if let Some((start, stop)) = self.first_stop() {
            let end = if self.stops.include { start + stop.len() } else { start };
            self.held.truncate(end);
            return Piece {
                text: std::mem::take(&mut self.held),
                stopped_by: Some(stop),
            };
        }
        let keep = self.held.len() - self.possible_stop();
        let rest = self.held.split_off(keep);
        Piece {
            text: std::mem::replace(&mut self.held, rest),
            stopped_by: None,
        }
    }

    /// The first occurrence of a stop string: where it starts, and which.
    fn first_stop(&self) -> Option<(usize, String)> {
        let found = self
            .stops
            .strings
            .iter()
            .filter_map(|stop| Some((self.held.find(stop.as_str())?, stop)));
        found
            .min_by_key(|(start, _)| *start)
            .map(|(start, stop)| (start, stop.clone()))
    }

    /// Bytes at the end that may be the beginning of a stop string.
    fn possible_stop(&self) -> usize {
        let longest = |stop: &String| {
            (1..stop.len())
                .rev()
                .find(|length| stop.is_char_boundary(*length) && self.held.ends_with(&stop[..*length]))
        };
        self.stops.strings.iter().filter_map(longest).max().unwrap_or(0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use homing_units::rng_for;
    use rand::Rng as _;

    /// Feeds `text` byte by byte; the pieces, and the rest where no stop string came.
    fn run(text: &[u8], stops: &[&str], include: bool) -> (Vec<String>, Option<String>) {
        let strings = stops.iter().map(|stop| (*stop).to_owned()).collect();
        let mut stream = TextStream::new(&Tokenizer::bytes(), StopStrings { strings, include });
        let mut pieces = Vec::new();
        for byte in text {
            let piece = stream.push(u32::from(*byte), true);
            pieces.push(piece.text);
            if piece.stopped_by.is_some() {
                return (pieces, piece.stopped_by);
            }
        }
        pieces.push(stream.finish());
        (pieces, None)
    }

    #[test]
    fn a_character_comes_whole() {
        let check = |text: &str, expected: &[&str]| assert_eq!(run(text.as_bytes(), &[], false).0, expected, "{text}");
        check("ab", &["a", "b", ""]);
        check("é!", &["", "é", "!", ""]);
        check("€", &["", "", "€", ""]);
        check("😀", &["", "", "", "😀", ""]);
    }

    #[test]
    fn broken_bytes_are_not_held_for_ever() {
        let (pieces, _) = run(&[0xe2; 20], &[], false);
        assert_eq!(pieces.concat().chars().count(), 20);
        assert!(
            pieces[7].chars().count() + pieces[..7].concat().chars().count() >= 7,
            "{pieces:?}"
        );
    }

    #[test]
    fn a_stop_string_that_spans_tokens_is_never_shown() {
        let check = |text: &str, stops: &[&str], shown: &str, stop: Option<&str>| {
            let (pieces, stopped) = run(text.as_bytes(), stops, false);
            assert_eq!(
                (pieces.concat().as_str(), stopped.as_deref()),
                (shown, stop),
                "{text} {stops:?}"
            );
        };
        check("say END now", &["END"], "say ", Some("END"));
        check("say EN", &["END"], "say EN", None);
        check("EEND", &["END"], "E", Some("END"));
        check("ababac", &["abac"], "ab", Some("abac"));
        check("x\n\ny", &["\n\n", "y"], "x", Some("\n\n"));
        check("naïf€", &["ïf€"], "na", Some("ïf€"));
        check("nothing", &[], "nothing", None);
    }

    #[test]
    fn nothing_stops_an_output_that_is_too_short() {
        let mut stream = TextStream::new(
            &Tokenizer::bytes(),
            StopStrings {
                strings: vec!["b".to_owned()],
                include: false,
            },
        );
        let shown: Vec<Piece> = [(b'b', false), (b'a', true), (b'b', true)]
            .map(|(byte, may)| stream.push(u32::from(byte), may))
            .into();
        assert_eq!(shown.iter().map(|piece| piece.text.as_str()).collect::<String>(), "ba");
        assert_eq!(shown[2].stopped_by.as_deref(), Some("b"));
    }

    #[test]
    fn a_stop_string_can_be_part_of_the_output() {
        let (pieces, stopped) = run(b"say END now", &["END"], true);
        assert_eq!((pieces.concat().as_str(), stopped.as_deref()), ("say END", Some("END")));
    }

    /// All text at once: where a stop string first comes up while tokens are added, it ends there.
    fn naive(tokens: &[u32], stops: &[String]) -> (String, Option<String>) {
        let tokenizer = Tokenizer::bytes();
        for count in 1..=tokens.len() {
            let mut decoder = tokenizer.stream();
            let text: String = tokens[..count].iter().map(|token| decoder.push(*token)).collect();
            let first = stops
                .iter()
                .filter_map(|stop| Some((text.find(stop.as_str())?, stop)))
                .min();
            if let Some((start, stop)) = first {
                return (text[..start].to_owned(), Some(stop.clone()));
            }
        }
        (tokenizer.decode(tokens), None)
    }

    #[test]
    fn pieces_add_up_to_what_decoding_at_once_gives() {
        for seed in 0..3000 {
            let mut rng = rng_for(seed, "text");
            let mut pick = |choices: &[u8]| choices[rng.next_u64() as usize % choices.len()];
            // Few different bytes, some of them parts of `é`, so that stop strings and broken characters are frequent.
            let tokens: Vec<u32> = (0..30).map(|_| u32::from(pick(b"aaabb\xc3\xa9"))).collect();
            let strings: Vec<String> = (0..pick(&[0, 1, 2]))
                .map(|_| {
                    (0..pick(&[1, 2, 3, 4]))
                        .map(|_| ['a', 'b', 'é'][usize::from(pick(&[0, 1, 2]))])
                        .collect()
                })
                .collect();
            let (text, stop) = naive(&tokens, &strings);
            let stops = StopStrings {
                strings: strings.clone(),
                include: false,
            };
            let mut stream = TextStream::new(&Tokenizer::bytes(), stops);
            let (mut shown, mut stopped) = (String::new(), None);
            for token in &tokens {
                let piece = stream.push(*token, true);
                shown.push_str(&piece.text);
                stopped = piece.stopped_by;
                if stopped.is_some() {
                    break;
                }
            }
            if stopped.is_none() {
                shown.push_str(&stream.finish());
            }
            assert_eq!((shown, stopped), (text, stop), "seed {seed}: {tokens:?} {strings:?}");
        }
    }
}
