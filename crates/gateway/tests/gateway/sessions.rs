//! Which turns are one session where the client does not say: those that go on from each other to the token.

use crate::support::engine::MODEL;
use crate::support::{Cluster, chat, tokens_of};
use homing_kv::Prompt;
use homing_model::Vocabulary;
use homing_router::event::Role;
use serde_json::{Value, json};
use std::collections::BTreeSet;

const ROLES: [Role; 4] = [Role::Prefill, Role::Decode, Role::Decode, Role::Decode];
const QUESTIONS: [&str; 6] = [
    "sum 1 or 2",
    "sum 1 or 3",
    "name a cat",
    "name a dog",
    "why so far",
    "say it all",
];

/// What a client asks in its turns, counted from 0: the same long instructions, its question, and what was said since.
struct Dialogue {
    chats: bool,
    instructions: String,
}

impl Dialogue {
    /// Instructions so long that all first prompts have the same whole blocks, and differ in the tokens after them.
    fn new(chats: bool, block_size: u32) -> Self {
        let fits = |dialogue: &Self| {
            let prompts = QUESTIONS.map(|question| Prompt::of_tokens(&dialogue.tokens(question, 0), block_size));
            prompts.iter().all(|prompt| *prompt == prompts[0])
        };
        (1_600..1_600 + block_size as usize)
            .map(|length| Self {
                chats,
                instructions: "obey ".repeat(400)[..length].to_owned(),
            })
            .find(fits)
            .expect("a question fits into a block")
    }

    fn messages(&self, question: &str, turn: usize) -> Value {
        let mut messages = vec![
            json!({"role": "system", "content": self.instructions}),
            json!({"role": "user", "content": question}),
        ];
        for said in 0..turn {
            let answer = format!("{question}: it is {said}, as was to be shown at some length").repeat(3);
            messages.push(json!({"role": "assistant", "content": answer}));
            messages.push(json!({"role": "user", "content": format!("and {said}?")}));
        }
        json!(messages)
    }

    fn text(&self, question: &str, turn: usize) -> String {
        let said = format!(" {question}, and so it goes on").repeat(5 * turn);
        format!("{}{question}{said}", self.instructions)
    }

    fn tokens(&self, question: &str, turn: usize) -> Vec<u32> {
        if self.chats {
            tokens_of(&self.messages(question, turn))
        } else {
            Vocabulary::tiny().tokenizer.encode_prompt(&self.text(question, turn))
        }
    }

    fn request(&self, question: &str, turn: usize) -> (&'static str, Value) {
        if self.chats {
            ("/v1/chat/completions", chat(&self.messages(question, turn), 3, false))
        } else {
            let prompt = self.text(question, turn);
            (
                "/v1/completions",
                json!({"model": MODEL, "prompt": prompt, "max_tokens": 3}),
            )
        }
    }
}

/// Asks, and says how that went and where.
async fn ask(cluster: &Cluster, (path, body): (&str, Value)) -> (String, String) {
    let answer = cluster.client.post(path, &body).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    let header = |name| answer.header(name).unwrap().to_owned();
    (header("x-homing-path"), header("x-homing-worker"))
}

async fn check(chats: bool, block_size: u32) {
    let cluster = Cluster::start_with(&ROLES, |config| {
        config.router.block_size = block_size;
        // With told speeds: which of the engines a busy machine lets seem slower is noise.
        config.router.policy = "homing:local_tokens=8:speed=h200".parse().unwrap();
    })
    .await;
    let dialogue = Dialogue::new(chats, block_size);
    let mut homes = Vec::new();
    for question in QUESTIONS {
        let (path, home) = ask(&cluster, dialogue.request(question, 0)).await;
        assert_eq!(path, "seed", "chats: {chats}, blocks of {block_size}: `{question}`");
        homes.push(home);
    }
    let used: BTreeSet<_> = homes.iter().collect();
    assert_eq!(used.len(), 3, "chats: {chats}, blocks of {block_size}: {homes:?}");
    for turn in 1..4 {
        for (question, home) in QUESTIONS.iter().zip(&homes) {
            assert_eq!(
                ask(&cluster, dialogue.request(question, turn)).await,
                ("append".to_owned(), home.clone()),
                "chats: {chats}, blocks of {block_size}: `{question}`, turn {turn}"
            );
        }
    }
    let page = cluster.client.get("/admin/sessions").await.json();
    let sessions = page["data"].as_array().unwrap();
    assert_eq!(sessions.len(), 6, "chats: {chats}, blocks of {block_size}: {page}");
    assert!(sessions.iter().all(|session| session["turns"] == 4), "{page}");
    cluster.until_idle().await;
}

#[tokio::test]
async fn short_questions_after_the_same_long_instructions_are_sessions_of_their_own() {
    check(false, 16).await;
    check(false, 64).await;
    check(true, 64).await;
}
