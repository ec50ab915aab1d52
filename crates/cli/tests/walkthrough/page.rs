//! The commands in a page, and what they print.

/// A page of the documentation.
pub(crate) struct Page {
    pub(crate) steps: Vec<Step>,
}

/// One command.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Step {
    /// Line of the page, counted from 1.
    pub(crate) line: usize,
    /// The name in the prompt.
    pub(crate) machine: String,
    pub(crate) command: String,
    /// The lines that the command prints.
    pub(crate) printed: Vec<String>,
}

impl Page {
    /// The commands in the `console` blocks of a page.
    pub(crate) fn parse(text: &str) -> Result<Self, String> {
        let mut steps: Vec<Step> = Vec::new();
        let mut lines = (1..).zip(text.lines());
        while let Some((_, line)) = lines.next() {
            if line.trim_end() != "```console" {
                continue;
            }
            let mut is_first = true;
            let mut is_closed = false;
            for (number, line) in lines.by_ref() {
                if line.trim_end() == "```" {
                    is_closed = true;
                    break;
                }
                if let Some((machine, command)) = prompt(line) {
                    steps.push(Step {
                        line: number,
                        machine: machine.to_owned(),
                        command: command.to_owned(),
                        printed: Vec::new(),
                    });
                } else if is_first {
                    return Err(format!("line {number}: a console block begins with a prompt"));
                } else if let Some(step) = steps.last_mut() {
                    // A command may go on in the next line.
                    match step.command.strip_suffix('\\') {
                        Some(begin) if step.printed.is_empty() => {
                            step.command = format!("{begin}{}", line.trim());
                        }
                        _ => step.printed.push(line.trim_end().to_owned()),
                    }
                }
                is_first = false;
            }
            if !is_closed {
                return Err("a console block is not closed".to_owned());
            }
        }
        match steps.is_empty() {
            true => Err("no console block".to_owned()),
            false => Ok(Self { steps }),
        }
    }
}

/// The machine and the command of a line with a prompt.
fn prompt(line: &str) -> Option<(&str, &str)> {
    let (machine, command) = line.split_once("$ ")?;
    let is_name = machine.starts_with(|c: char| c.is_ascii_lowercase())
        && machine.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit());
    is_name.then_some((machine, command.trim_end()))
}

impl Step {
    /// Whether the command goes on while the next ones are carried out.
    pub(crate) fn goes_on(&self) -> bool {
        self.command.ends_with('&') && !self.command.ends_with("&&")
    }

    /// Whether `printed` is what the page shows.
    pub(crate) fn is_shown_as(&self, printed: &[String]) -> bool {
        let shown: Vec<_> = self.printed.iter().map(|line| words(line)).collect();
        let printed: Vec<_> = printed.iter().map(|line| words(line)).collect();
        let relevant = |lines: Vec<String>| -> Vec<String> {
            lines.into_iter().filter(|line| !line.is_empty()).collect()
        };
        // Notes go to standard error, so their place among the other lines is by chance.
        let is_note = |line: &String| line.starts_with("note: ");
        let (shown_notes, shown): (Vec<_>, Vec<_>) = relevant(shown).into_iter().partition(is_note);
        let (notes, printed): (Vec<_>, Vec<_>) = relevant(printed).into_iter().partition(is_note);
        let shows_all_notes = lines_match(&shown_notes, &notes);
        let leaves_lines_out = shown.iter().any(|line| line == "…");
        let shows_these_notes =
            shown_notes.iter().all(|shown| notes.iter().any(|note| line_matches(shown, note)));
        lines_match(&shown, &printed) && (shows_all_notes || leaves_lines_out && shows_these_notes)
    }
}

/// The words of a line, with one space between them. Lines of a box have none.
fn words(line: &str) -> String {
    let is_drawn = |c: char| c == '─' || c == '━';
    let words = line.split_whitespace().filter(|word| !word.chars().all(is_drawn));
    words.collect::<Vec<_>>().join(" ")
}

fn lines_match(shown: &[String], printed: &[String]) -> bool {
    match (shown.split_first(), printed.split_first()) {
        (None, None) => true,
        (Some((first, rest)), _) if first == "…" => {
            lines_match(rest, printed)
                || printed.split_first().is_some_and(|(_, printed)| lines_match(shown, printed))
        }
        (Some((shown, shown_rest)), Some((printed, printed_rest))) => {
            line_matches(shown, printed) && lines_match(shown_rest, printed_rest)
        }
        _ => false,
    }
}

/// Whether the parts between `…` occur in this order.
fn line_matches(shown: &str, printed: &str) -> bool {
    let Some((begin, rest)) = shown.split_once('…') else { return shown == printed };
    let Some(mut printed) = printed.strip_prefix(begin) else { return false };
    let mut parts = rest.split('…').peekable();
    while let Some(part) = parts.next() {
        if parts.peek().is_none() {
            return printed.ends_with(part);
        }
        match printed.find(part) {
            Some(at) => printed = &printed[at + part.len()..],
            None => return false,
        }
    }
    true
}
