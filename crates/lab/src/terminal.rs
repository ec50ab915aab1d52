//! What the place we print to can show.

use std::io::IsTerminal;

/// Width when nobody tells: what a terminal had for fifty years.
const WIDTH_DEFAULT: usize = 80;

/// Narrower than this nothing reads well; longer lines then wrap.
const WIDTH_MIN: usize = 40;

/// Wider than this nothing reads better.
const WIDTH_MAX: usize = 120;

/// How to print.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Terminal {
    /// Columns.
    pub width: usize,
    /// Whether to colour.
    pub colour: bool,
    /// Whether anything beyond ASCII can be shown.
    pub unicode: bool,
}

/// The colours used.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Colour {
    /// What it is about.
    Green,
    /// What it is compared with.
    Blue,
    /// What is slow.
    Red,
    /// What is said in passing.
    Grey,
    /// Headings.
    Bold,
}

impl Terminal {
    /// As plain as can be: for files, pipes and tests.
    pub const PLAIN: Self = Self { width: WIDTH_DEFAULT, colour: false, unicode: false };

    /// What standard output can show, as the environment has it: `NO_COLOR` (<https://no-color.org>),
    /// `TERM=dumb`, `COLUMNS`, the locale.
    #[must_use]
    pub fn of_stdout() -> Self {
        let size = terminal_size::terminal_size().map(|(width, _)| usize::from(width.0));
        Self::from_environment(std::io::stdout().is_terminal(), size, |name| {
            std::env::var(name).ok()
        })
    }

    fn from_environment(
        is_terminal: bool,
        size: Option<usize>,
        var: impl Fn(&str) -> Option<String>,
    ) -> Self {
        let set = |name| var(name).filter(|value| !value.is_empty());
        let dumb = var("TERM").as_deref() == Some("dumb");
        // The first one set decides (POSIX); with none set it is the C locale, but containers
        // rarely set any and their terminals know UTF-8, so only an explicit other one counts.
        let locale = set("LC_ALL").or_else(|| set("LC_CTYPE")).or_else(|| set("LANG"));
        let unicode = locale.is_none_or(|locale| {
            let locale = locale.to_lowercase();
            locale.contains("utf-8") || locale.contains("utf8")
        });
        let columns = set("COLUMNS").and_then(|columns| columns.parse().ok());
        Self {
            width: columns.or(size).unwrap_or(WIDTH_DEFAULT).clamp(WIDTH_MIN, WIDTH_MAX),
            colour: is_terminal && !dumb && set("NO_COLOR").is_none(),
            unicode: unicode && !dumb,
        }
    }

    /// `text` in `colour`, or as it is.
    #[must_use]
    pub fn paint(&self, colour: Colour, text: &str) -> String {
        if !self.colour || text.is_empty() {
            return text.to_owned();
        }
        let code = match colour {
            Colour::Green => "32",
            Colour::Blue => "34",
            Colour::Red => "31",
            Colour::Grey => "90",
            Colour::Bold => "1",
        };
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

/// How many columns a text takes, colours left out. Counts characters: all we print are single
/// width.
pub(crate) fn width_of(text: &str) -> usize {
    let mut width = 0;
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c == '\x1b' {
            // An SGR sequence ends with its `m`.
            chars.by_ref().take_while(|&c| c != 'm').for_each(drop);
        } else {
            width += 1;
        }
    }
    width
}

#[cfg(test)]
mod tests {
    use super::*;

    fn with(is_terminal: bool, size: Option<usize>, vars: &[(&str, &str)]) -> Terminal {
        Terminal::from_environment(is_terminal, size, |name| {
            vars.iter().find(|(n, _)| *n == name).map(|(_, value)| (*value).to_owned())
        })
    }

    #[test]
    fn colour_only_where_it_is_wanted() {
        assert!(with(true, None, &[]).colour);
        assert!(!with(false, None, &[]).colour, "a pipe");
        assert!(!with(true, None, &[("NO_COLOR", "1")]).colour);
        assert!(with(true, None, &[("NO_COLOR", "")]).colour, "empty is unset");
        assert!(!with(true, None, &[("TERM", "dumb")]).colour);
    }

    #[test]
    fn width_as_told_within_reason() {
        assert_eq!(with(true, None, &[]).width, 80);
        assert_eq!(with(true, Some(100), &[]).width, 100);
        assert_eq!(with(true, Some(100), &[("COLUMNS", "60")]).width, 60);
        assert_eq!(with(true, Some(100), &[("COLUMNS", "wide")]).width, 100);
        assert_eq!(with(true, Some(7), &[]).width, WIDTH_MIN);
        assert_eq!(with(true, Some(400), &[]).width, WIDTH_MAX);
    }

    #[test]
    fn ascii_where_the_locale_says_so() {
        assert!(with(true, None, &[]).unicode);
        assert!(with(true, None, &[("LANG", "de_DE.UTF-8")]).unicode);
        assert!(!with(true, None, &[("LANG", "C")]).unicode);
        assert!(!with(true, None, &[("LC_ALL", "POSIX"), ("LANG", "C.utf8")]).unicode);
        assert!(!with(true, None, &[("TERM", "dumb")]).unicode);
    }

    #[test]
    fn paint_adds_no_width() {
        let colourful = Terminal { colour: true, ..Terminal::PLAIN };
        let painted = colourful.paint(Colour::Red, "sync µs");
        assert_ne!(painted, "sync µs");
        assert_eq!(width_of(&painted), 7);
        assert_eq!(Terminal::PLAIN.paint(Colour::Red, "sync"), "sync");
        assert_eq!(colourful.paint(Colour::Red, ""), "");
    }
}
