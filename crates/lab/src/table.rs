//! Text tables.

use crate::terminal::{Colour, Terminal, width_of};

/// The side on which a column's cells are aligned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Align {
    /// For words.
    Left,
    /// For numbers.
    Right,
}

/// A table: a heading, a rule, rows.
#[derive(Clone, Debug)]
pub struct Table {
    columns: Vec<(String, Align)>,
    rows: Vec<Vec<String>>,
}

impl Table {
    /// An empty table with these columns.
    #[must_use]
    pub fn new(columns: &[(&str, Align)]) -> Self {
        Self {
            columns: columns.iter().map(|&(name, align)| (name.to_owned(), align)).collect(),
            rows: Vec::new(),
        }
    }

    /// Adds a row. Cells may be coloured.
    ///
    /// # Panics
    /// If the number of cells is not that of the columns.
    pub fn row(&mut self, cells: impl IntoIterator<Item = impl Into<String>>) -> &mut Self {
        let cells: Vec<String> = cells.into_iter().map(Into::into).collect();
        assert_eq!(cells.len(), self.columns.len(), "one cell per column");
        self.rows.push(cells);
        self
    }

    /// The table as text; each line ends with a newline. Columns without content are left out.
    #[must_use]
    pub fn render(&self, terminal: &Terminal) -> String {
        let shown: Vec<usize> = (0..self.columns.len())
            .filter(|&i| self.rows.iter().any(|row| !row[i].is_empty()))
            .collect();
        let widths: Vec<usize> = shown
            .iter()
            .map(|&i| {
                let cells = self.rows.iter().map(|row| width_of(&row[i]));
                cells.max().unwrap_or(0).max(width_of(&self.columns[i].0))
            })
            .collect();
        let line = |cell: &dyn Fn(usize) -> String| {
            let cells = shown
                .iter()
                .zip(&widths)
                .map(|(&i, &width)| pad(&cell(i), width, self.columns[i].1));
            let joined = cells.collect::<Vec<_>>().join("  ");
            format!("{}\n", joined.trim_end())
        };
        let mut text = line(&|i| terminal.paint(Colour::Bold, &self.columns[i].0));
        let rule = if terminal.unicode { "─" } else { "-" };
        let width = widths.iter().sum::<usize>() + 2 * widths.len().saturating_sub(1);
        text += &terminal.paint(Colour::Grey, &rule.repeat(width));
        text.push('\n');
        for row in &self.rows {
            text += &line(&|i| row[i].clone());
        }
        text
    }
}

pub(crate) fn pad(text: &str, width: usize, align: Align) -> String {
    let space = " ".repeat(width.saturating_sub(width_of(text)));
    match align {
        Align::Left => format!("{text}{space}"),
        Align::Right => format!("{space}{text}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn table(terminal: &Terminal) -> String {
        let mut table = Table::new(&[
            ("engine", Align::Left),
            ("writes/s", Align::Right),
            ("nothing", Align::Left),
            ("p99", Align::Right),
        ]);
        table.row(["none", "812 k", "", "97.1 µs"]).row([
            &terminal.paint(Colour::Green, "rio"),
            "9.1 k",
            "",
            "1 ms",
        ]);
        table.render(terminal)
    }

    #[test]
    fn columns_line_up_and_empty_ones_go() {
        assert_eq!(
            table(&Terminal::PLAIN),
            "engine  writes/s      p99\n\
             -------------------------\n\
             none       812 k  97.1 µs\n\
             rio        9.1 k     1 ms\n"
        );
    }

    #[test]
    fn colours_do_not_move_columns() {
        let colourful = Terminal { colour: true, ..Terminal::PLAIN };
        let widths = |text: &str| text.lines().map(width_of).collect::<Vec<_>>();
        assert_eq!(widths(&table(&colourful)), widths(&table(&Terminal::PLAIN)));
        assert!(table(&colourful).contains("\x1b[32mrio"));
    }

    #[test]
    #[should_panic(expected = "one cell per column")]
    fn a_short_row_panics() {
        Table::new(&[("a", Align::Left), ("b", Align::Left)]).row(["1"]);
    }
}
