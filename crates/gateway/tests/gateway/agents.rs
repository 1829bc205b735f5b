//! Agents before the router: whose sessions they are, which sub-agents belong to them, and where they break their own
//! prefixes.

use crate::support::engine::MODEL;
use crate::support::{Cluster, whole};
use homing_gateway::TurnLog;
use homing_router::event::Role;
use http::Method;
use serde_json::{Value, json};

async fn post(cluster: &mut Cluster, path: &str, headers: &[(&str, &str)], body: &Value) -> TurnLog {
    let answer = whole(cluster.client.send(Method::POST, path, headers, body.to_string()).await).await;
    assert_eq!(answer.status, 200, "{}", answer.text);
    cluster.turn().await
}

fn claude(system: &str, texts: &[&str], tools: &[&str]) -> Value {
    let message = |(index, text): (usize, &&str)| json!({"role": if index % 2 == 0 { "user" } else { "assistant" }, "content": text});
    let messages: Vec<Value> = texts.iter().enumerate().map(message).collect();
    let tool = |name: &&str| json!({"name": name, "input_schema": {"type": "object"}});
    let tools: Vec<Value> = tools.iter().map(tool).collect();
    json!({"model": MODEL, "max_tokens": 2, "system": system, "messages": messages, "tools": tools})
}

fn chat(messages: &[(&str, &str)]) -> Value {
    let message = |(role, text): &(&str, &str)| json!({"role": role, "content": text});
    let messages: Vec<Value> = messages.iter().map(message).collect();
    json!({"model": MODEL, "max_tokens": 2, "messages": messages})
}

async fn sessions(cluster: &Cluster) -> Vec<Value> {
    let page = cluster.client.get("/admin/sessions").await.json();
    page["data"].as_array().unwrap().clone()
}

#[tokio::test]
async fn sub_agents_and_titles_are_shown_under_their_parent() {
    let mut cluster = Cluster::start(&[Role::Both]).await;
    let path = "/v1/messages";
    let main = claude(
        "You are Claude Code. ".repeat(5).as_str(),
        &["do it"],
        &["Bash", "Task"],
    );
    let session = ("x-claude-code-session-id", "s1");
    let log = post(&mut cluster, path, &[session], &main).await;
    assert_eq!((log.client, log.session.as_str()), ("claude-code", "s1"));
    let title = claude("Make a title.", &["do it"], &[]);
    post(&mut cluster, path, &[session], &title).await;
    let agent = [session, ("x-claude-code-agent-id", "a1")];
    let explore = claude("You are a file search specialist.", &["find it"], &["Bash"]);
    let log = post(&mut cluster, path, &agent, &explore).await;
    assert_eq!(log.session, "s1:a1");
    // An older release, which packs its session into a field and has no word for its sub-agents.
    let mut old = main.clone();
    old["metadata"] = json!({"user_id": "user_0_account__session_s2"});
    let log = post(&mut cluster, path, &[], &old).await;
    assert_eq!((log.client, log.session.as_str()), ("claude-code", "s2"));
    let sessions = sessions(&cluster).await;
    assert_eq!(sessions.len(), 4, "{sessions:?}");
    // The latest first.
    let parent = &sessions[3]["id"];
    assert_eq!(
        (&sessions[1]["parent"], &sessions[2]["parent"]),
        (parent, parent),
        "{sessions:?}"
    );
    assert_eq!(
        (&sessions[0]["parent"], &sessions[3]["parent"]),
        (&Value::Null, &Value::Null)
    );
    assert!(sessions.iter().all(|session| session["client"] == "claude-code"));
}

#[tokio::test]
async fn a_client_that_names_nothing_is_recognised_and_known() {
    let mut cluster = Cluster::start(&[Role::Both]).await;
    let path = "/v1/chat/completions";
    let system = "You are a helpful assistant that can interact multiple times with a computer shell to solve \
                  programming tasks.";
    let first = post(
        &mut cluster,
        path,
        &[],
        &chat(&[("system", system), ("user", "fix it")]),
    )
    .await;
    let more = chat(&[
        ("system", system),
        ("user", "fix it"),
        ("assistant", "ls"),
        ("user", "a.py"),
    ]);
    let second = post(&mut cluster, path, &[], &more).await;
    assert_eq!(second.session, first.session);
    assert_eq!(
        (second.client, second.turn_index, second.prefix_break),
        ("mini-swe-agent", 1, None)
    );
    let aider = post(
        &mut cluster,
        path,
        &[("x-title", "Aider")],
        &chat(&[("user", "hello there, aider")]),
    )
    .await;
    assert_eq!(aider.client, "aider");
    assert_ne!(aider.session, first.session);
}

#[tokio::test]
async fn what_broke_a_prefix_and_what_it_cost_is_shown() {
    let mut cluster = Cluster::start(&[Role::Both]).await;
    let path = "/v1/messages";
    let session = [("x-claude-code-session-id", "s1")];
    let system = |date: &str| {
        format!(
            "You are Claude Code.\nToday's date: {date}\n{}",
            "Be careful. ".repeat(20)
        )
    };
    let turn = |date: &str, texts: &[&str], tools: &[&str]| claude(&system(date), texts, tools);
    let long = "a long question ".repeat(20);
    let tools = ["Bash", "Task"];
    let mut check = async |body: Value, expected: Option<&str>| {
        let log = post(&mut cluster, path, &session, &body).await;
        assert_eq!(log.prefix_break, expected, "{body}");
        assert_eq!(log.prefix_lost_tokens > 0, expected.is_some());
    };
    check(turn("2026-11-30", &[&long], &tools), None).await;
    check(turn("2026-11-30", &[&long, "ok", "go on"], &tools), None).await;
    check(turn("2026-11-30", &[&long, "ok", "go on"], &tools), None).await;
    check(
        turn("2026-12-01", &[&long, "ok", "go on", "ok", "and on"], &tools),
        Some("date_line"),
    )
    .await;
    check(
        turn(
            "2026-12-01",
            &[
                &long,
                "no, never, not at all",
                "go on, please, with all of it",
                "ok",
                "and on",
            ],
            &tools,
        ),
        Some("edit"),
    )
    .await;
    let page = cluster.client.get("/admin/sessions").await.json();
    let entry = &page["data"][0];
    assert_eq!(
        (&entry["prefix_breaks"], &entry["turns"]),
        (&json!(2), &json!(5)),
        "{entry}"
    );
    assert_eq!(entry["last_break"]["kind"], "edit");
    assert_eq!(entry["last_break"]["message"], 2);
    assert!(entry["prefix_lost_tokens"].as_u64().unwrap() > 300, "{entry}");
    let metrics = cluster.client.get("/metrics").await.text;
    assert!(
        metrics.contains(r#"homing_prefix_breaks_total{client="claude-code",kind="date_line"} 1"#),
        "{metrics}"
    );
    assert!(
        metrics.contains(r#"homing_prefix_lost_tokens_total{client="claude-code",kind="edit"}"#),
        "{metrics}"
    );
}

#[tokio::test]
async fn the_known_cases_are_undone_where_that_is_wanted() {
    for canonicalise in [false, true] {
        let mut cluster = Cluster::start_with(&[Role::Both], |config| config.canonicalise = canonicalise).await;
        let session = [("x-claude-code-session-id", "s1")];
        let billed = |cch: &str, date: &str, texts: &[&str], tools: &[&str]| {
            let mut body = claude("", texts, tools);
            body["system"] = json!([
                {"type": "text", "text": format!("x-anthropic-billing-header: cc_version=2.1; cc_entrypoint=cli; cch={cch};")},
                {"type": "text", "text": format!("You are Claude Code.\n{}\nToday's date: {date}", "Be careful. ".repeat(20))}]);
            body
        };
        let first = billed("aaaaa", "2026-11-30", &["go"], &["Bash", "Task"]);
        let second = billed("bbbbb", "2026-12-01", &["go", "ok", "go on"], &["Task", "Bash"]);
        post(&mut cluster, "/v1/messages", &session, &first).await;
        let log = post(&mut cluster, "/v1/messages", &session, &second).await;
        let expected = (!canonicalise).then_some("tools_reordered");
        assert_eq!(log.prefix_break, expected, "canonicalise: {canonicalise}");
        let seen = cluster.engines[0].seen();
        let system = seen[1].body["messages"][0]["content"].as_str().unwrap();
        assert_eq!(system.contains("cch="), !canonicalise, "{system}");
        assert_eq!(system.contains("2026-12-01"), !canonicalise, "{system}");
    }
}
