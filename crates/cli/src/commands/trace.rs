//! `homing trace`: looks at traces, translates them, and writes those of generators.
//!
//! A file appears under its name when it is whole. Where the format to write cannot carry all of the trace, nothing is
//! written, unless the user said that what is lost may be lost.

use crate::failure::Usage;
use crate::output::{self, OutFile, print, say};
use crate::trace_args::{Convert, Format, Generate, Reading, Stats, Target, TraceArgs, TraceCommand};
use crate::trace_file;
use anyhow::{Context, Result};
use clap::ValueEnum;
use homing_workload::stats::{Quantiles, TraceStats, stats};
use homing_workload::{OutputFormat, ReadOptions, Trace, is_generator, losses, write_trace};
use std::io::{self, BufWriter, Write};
use std::path::Path;

/// Runs the command.
pub fn run(args: &TraceArgs) -> Result<()> {
    match &args.command {
        TraceCommand::Stats(args) => show(args),
        TraceCommand::Convert(args) => convert(args),
        TraceCommand::Generate(args) => generate(args),
    }
}

fn show(args: &Stats) -> Result<()> {
    let stats = stats(&open(&args.trace, &args.reading)?);
    print(&if args.json {
        serde_json::to_string_pretty(&stats).context("the figures are no JSON")? + "\n"
    } else {
        table(&stats)
    })
}

fn convert(args: &Convert) -> Result<()> {
    let trace = open(&args.trace, &args.reading)?;
    write(&trace, &args.target)
}

fn generate(args: &Generate) -> Result<()> {
    if !is_generator(&args.generator) {
        let line = format!(
            "`{}` is no generator, expected a name such as `gen:agent`",
            args.generator
        );
        return Err(Usage::error(line));
    }
    write(&trace_file::open(&args.generator, args.seed)?, &args.target)
}

fn open(name: &str, reading: &Reading) -> Result<Trace> {
    let options = ReadOptions {
        shared_boilerplate: !reading.separate_boilerplate,
        block_size: reading.block_size,
    };
    trace_file::open_with(name, reading.seed, &options)
}

/// Writes the trace, whole or not at all.
fn write(trace: &Trace, target: &Target) -> Result<()> {
    let format = OutputFormat::from(target.to);
    let lost = losses(trace, format);
    if !lost.is_empty() && !target.lossy {
        return Err(refused(trace, target, &lost));
    }
    output::clean_up_when_interrupted()?;
    let out = OutFile::create("output", &target.out)?;
    out.write(|file| write_packed(trace, format, &target.out, BufWriter::with_capacity(1 << 20, file)))?;
    if !lost.is_empty() {
        say(format_args!("note: lost: {}", lost.join("; ")));
    }
    say(format_args!(
        "wrote {} requests of {} sessions to {}",
        trace.turn_count(),
        trace.sessions.len(),
        target.out.display()
    ));
    Ok(())
}

/// The error that the format cannot carry all, and what would.
fn refused(trace: &Trace, target: &Target, lost: &[String]) -> anyhow::Error {
    let name = |format: Format| {
        format
            .to_possible_value()
            .map_or_else(String::new, |value| value.get_name().to_owned())
    };
    let whole = Format::value_variants()
        .iter()
        .find(|format| losses(trace, (**format).into()).is_empty())
        .map(|format| format!("`--to {}`, which carries all, or ", name(*format)));
    Usage::error(format_args!(
        "`{}` in {} would lose {}; expected {}`--lossy` to write the rest",
        trace.name,
        name(target.to),
        lost.join("; "),
        whole.unwrap_or_default()
    ))
}

/// Writes the trace, packed as the name of its file says.
fn write_packed(trace: &Trace, format: OutputFormat, name: &Path, mut sink: impl Write) -> io::Result<()> {
    match name.extension().and_then(|extension| extension.to_str()) {
        Some("zst") => {
            let mut packed = zstd::Encoder::new(&mut sink, 0)?;
            write_trace(trace, format, &mut packed)?;
            packed.finish()?;
        }
        Some("gz") => {
            let mut packed = flate2::write::GzEncoder::new(&mut sink, flate2::Compression::default());
            write_trace(trace, format, &mut packed)?;
            packed.finish()?;
        }
        _ => write_trace(trace, format, &mut sink)?,
    }
    sink.flush()
}

/// The figures for a person.
fn table(stats: &TraceStats) -> String {
    let mut text = format!(
        "{}: {} sessions, {} requests ({} of {} sub-agents), blocks of {} tokens\n",
        stats.trace, stats.sessions, stats.requests, stats.sub_agent_requests, stats.sub_agents, stats.block_size
    );
    text += &match stats.starts_span_s {
        Some(span) => format!("sessions start as recorded, within {span:.1} s\n"),
        None => "no recorded starts\n".to_owned(),
    };
    text += &format!(
        "{} prompt tokens, {} output tokens\n\n{:<28}{:>10}{:>10}{:>10}{:>10}{:>10}\n",
        stats.prompt_tokens, stats.output_tokens, "", "mean", "p50", "p90", "p99", "max"
    );
    let rows = [
        ("turns a session", stats.turns_per_session),
        ("prompt (tokens)", stats.prompt_length),
        ("first prompt", stats.first_prompt_length),
        ("last prompt", stats.last_prompt_length),
        ("output", stats.output_length),
        ("new in a later turn", stats.tail.length),
        ("rewritten", stats.rewrites.length),
        ("boilerplate", stats.boilerplate_length),
        ("gap (s)", stats.gap_s),
    ];
    for (name, quantiles) in rows {
        text += &row(name, quantiles);
    }
    let percent = |share: f64| share * 100.0;
    text += &format!(
        "\n{:.1}% of later prompts repeats the turn before; a cache without limit hits {:.1}% of all prompt tokens\n",
        percent(stats.repeated_share),
        percent(stats.unlimited_cache_share)
    );
    text += &format!(
        "{:.1}% of later turns rewrite history; boilerplate is {:.1}% of first prompts\n",
        percent(stats.rewrites.share),
        percent(stats.boilerplate_share)
    );
    text
}

fn row(name: &str, quantiles: Option<Quantiles>) -> String {
    let Some(found) = quantiles else {
        return format!("{name:<28}{:>10}\n", "none");
    };
    let figures = [found.mean, found.p50, found.p90, found.p99, found.max];
    let cells: String = figures.iter().map(|figure| format!("{figure:>10.1}")).collect();
    format!("{name:<28}{cells}\n")
}
